"""Write transcripts again: `python -m tests.golden [NAME ...]`; read the diff."""

import argparse
import tempfile
from pathlib import Path

from tests.support import paths  # noqa: F401  it makes the next imports possible

# isort: split
from golden import transcript
from golden.cases import CASES, needed

HERE = Path(__file__).parent / "transcripts"
NAMES = [case.name for case in CASES]


def main() -> None:
    """Run the named cases and the cases that they read; a line that agrees with the new one within
    rounding stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} [all]")
    names = parser.parse_args().names
    for name in names:
        if name not in NAMES:
            parser.error(f"{name!r} is no transcript; known are {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as place:
        for case, text in transcript.record(Path(place), needed(names)):
            if not names or case.name in names:
                renew(HERE / f"{case.name}.txt", text)


def renew(path: Path, text: str) -> None:
    """Write one transcript where more than rounding changed."""
    known = path.read_text("utf-8") if path.exists() else ""
    if transcript.differences(text, known):
        path.write_text(transcript.merged(text, known), "utf-8")
        print(path.name, text.splitlines()[1], flush=True)


main()
