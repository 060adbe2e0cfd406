"""Secrets in a command's environment, and where none of them may be seen afterwards.

Their form is not `hf_...`, which is hidden by its form alone.
"""

import base64

FIRST, SECOND, STORED, KEY = (f"CaNaRy{number}OfTheTests{number}" for number in range(4))
PASSWORD = "CaNaRyPassword"
TOKENS = {"HF_TOKEN": FIRST, "HUGGING_FACE_HUB_TOKEN": SECOND, "ROPEXT_ENDPOINT_KEY": KEY}
_CODED = base64.b64encode(PASSWORD.encode()).decode().rstrip("=")
# Run first in an interpreter: Python itself tells what each process is started with.
HEAR = """
import sys
heard = open("started.txt", "w")
def hook(event, args):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        heard.write(event + " " + repr(args[:2]) + "\\n")
        heard.flush()
sys.addaudithook(hook)
"""


def check(text, where):
    """No secret stands in a text."""
    for secret in (FIRST, SECOND, STORED, KEY, PASSWORD, _CODED):
        assert secret not in text, where


def check_files(folder):
    """Nor in any file but the one that the hub keeps its token in."""
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / "home" / "token":
            check(path.read_bytes().decode("latin-1"), str(path))
