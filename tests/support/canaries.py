"""Secrets in a command's environment, and checks that none of them appears afterwards.

Their form is not `hf_...`, because ropext hides any text of that form.
"""

import base64

FIRST, SECOND, STORED, KEY = (f"CaNaRy{number}OfTheTests{number}" for number in range(4))
PASSWORD = "CaNaRyPassword"
TOKENS = {"HF_TOKEN": FIRST, "HUGGING_FACE_HUB_TOKEN": SECOND, "ROPEXT_ENDPOINT_KEY": KEY}
_CODED = base64.b64encode(PASSWORD.encode()).decode().rstrip("=")
# Run first in an interpreter: Python itself reports the arguments of each process.
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
    """Check that no secret is in a text."""
    for secret in (FIRST, SECOND, STORED, KEY, PASSWORD, _CODED):
        assert secret not in text, where


def check_files(folder):
    """Check that no file has a secret, except the file in which the hub keeps its token."""
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / "home" / "token":
            check(path.read_bytes().decode("latin-1"), str(path))
