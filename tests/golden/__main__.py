"""Write the transcripts anew: `PYTHONPATH=tests python -m golden`; read the diff."""

import tempfile
from pathlib import Path

from golden import transcript

HERE = Path(__file__).parent / "transcripts"


def main() -> None:
    """Run all cases; a line that agrees with the new one within rounding stays as it is."""
    HERE.mkdir(exist_ok=True)
    kept = set()
    with tempfile.TemporaryDirectory() as place:
        for case, text in transcript.record(Path(place)):
            path = HERE / f"{case.name}.txt"
            kept.add(path)
            known = path.read_text("utf-8") if path.exists() else ""
            if transcript.differences(text, known):
                path.write_text(transcript.merged(text, known), "utf-8")
                print(path.name, text.splitlines()[1], flush=True)
    for path in set(HERE.glob("*.txt")) - kept:
        path.unlink()


main()
