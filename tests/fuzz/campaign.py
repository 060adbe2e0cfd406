"""One input after another through everything that reads files, and what came of each.

The promise: a result, or a RopextError of one printable line; no other exception, nothing written
but the output.
"""

import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import seeds, shapes
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import ropext
from ropext import families
from ropext.base.errors import RopextError
from ropext.cli import output
from ropext.files import inspecting
from ropext.files.checkpoint import open_snapshot
from ropext.files.checkpoint.provenance import read_record
from ropext.planning import ExtensionPlan, Plan
from ropext.results.report import text
from ropext.scaling import forms
from ropext.verifying import verification
from ropext.verifying.checks import Depth, RotarySubject
from ropext.verifying.claim import claim_of
from ropext.verifying.rotary import check_lengths
from ropext.verifying.weights import check_weights

LONGEST_SENTENCE = 500  # characters
LARGEST_GROWTH = 10**9  # bytes of memory for one input
FORGERY = "\nforged line"  # part of one of the words that spoil the inputs
LONG = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
HANGS = 20  # CPU seconds; a guard against a hang, not a measure of speed
WAITS = 20  # seconds; nearly all of them asleep, not in line for a processor
ASLEEP = 0.9  # of them

METHODS: tuple[dict[str, Any], ...] = (
    {},
    {"method": "pi"},
    {"method": "ntk"},
    {"method": "dynamic"},
    {"method": "by-parts"},
    {"method": "llama3"},
    {"method": "yarn", "attention_factor": 1.25},
    {"method": "ntk", "attention_factor": 1.25},
    {"method": "abf", "theta": 1e13},
    {"from_original": True},
    {"method": "pi", "context": 100},
)
FACTORS: tuple[dict[str, Any], ...] = (
    *({"factor": f} for f in (4.0, 4.0, 4.0, 1.0001, 4096.0, 3.7)),
    {"target": 2**31 - 1},
    {"target": 10**6},
)


class Broken(AssertionError):
    """The promise was not kept."""


@dataclass
class Input:
    """One checkpoint directory with one spoiled file, and the options of the call."""

    file: str
    data: bytes
    options: dict[str, Any]
    extend: bool


@dataclass
class Tally:
    """What came of the inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    planned: list[tuple[dict[str, Any], Plan]] = field(default_factory=list)
    slowest: float = 0.0  # seconds of one input
    largest: int = 0  # bytes of memory that one input took above the level before


# Shares of a hundred inputs: the other files are small, and few lines read them.
FILES = ["config.json"] * 66 + ["ropext.json"] * 16
FILES += [name for name in seeds.FILES if name not in FILES for _ in range(3)]


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    """Draw one input of any kind."""
    file = draw(st.sampled_from(FILES))
    options = draw(st.sampled_from(METHODS)) | draw(st.sampled_from(FACTORS))
    data = draw(_contents(file))
    return Input(file, data, options, extend=draw(st.sampled_from([False] * 19 + [True])))


@st.composite
def _contents(draw: st.DrawFn, file: str) -> bytes:
    if file == seeds.SHARD:
        return draw(shapes.damaged(seeds.safetensors()))
    if file == "ropext.json":
        document = draw(shapes.records())
    elif file == "config.json":
        document = draw(configs())
    else:
        document = draw(shapes.reshaped(seeds.OTHERS[file]))
    data = shapes.encoded(document)
    if draw(st.sampled_from([False] * 9 + [True])):
        return draw(shapes.damaged(data))
    return data


@st.composite
def configs(draw: st.DrawFn) -> Any:
    """Draw a spoiled config of a known model; half of these configs can most often be extended."""
    seed = draw(st.sampled_from(("rotary",) * 6 + ("small",) * 3 + ("any",)))
    configs = seeds.rotary_configs() if seed == "rotary" else seeds.model_configs()
    config = seeds.SMALL_LLAMA if seed == "small" else draw(st.sampled_from(configs))
    if draw(st.booleans()):
        config = draw(shapes.plannable(config))
        if draw(st.booleans()):
            return config
    return draw(shapes.reshaped(config))


@contextmanager
def guarded() -> Any:
    """Turn a hang into a failure, whether the process computes or waits for something that never
    comes."""
    began = time.monotonic() - awake()

    def stop(signum: int, frame: Any) -> None:
        raise Broken(f"it took {HANGS} CPU seconds")

    def look_up(signum: int, frame: Any) -> None:
        nonlocal began
        slept = time.monotonic() - awake() - began
        began += slept
        if slept > ASLEEP * WAITS:
            raise Broken(f"it slept for {slept:.1f} seconds")

    before = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, look_up)
    signal.setitimer(signal.ITIMER_PROF, HANGS)
    if SCHEDULED.exists():
        signal.setitimer(signal.ITIMER_REAL, WAITS, WAITS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


# Nanoseconds in which this process computed, and in which it waited for a processor: they tell a
# busy machine from a process that waits for nothing.
SCHEDULED = Path("/proc/self/schedstat")


def awake() -> float:
    """Return the seconds that this process computed or would have; 0 off Linux."""
    if not SCHEDULED.exists():
        return 0
    computed, in_line, _ = SCHEDULED.read_text(encoding="utf-8").split()
    return (int(computed) + int(in_line)) / 1e9


def check_sentence(sentence: str) -> None:
    if not sentence or len(sentence) >= LONGEST_SENTENCE or not sentence.isprintable():
        raise Broken(f"not one printable sentence of < {LONGEST_SENTENCE}: {sentence[:600]!r}")


def check_json(document: Any) -> None:
    """Check that the output of --json is JSON, and text that a terminal or pipe takes."""
    check_text(printed := output.as_json(document))
    json.loads(printed, parse_constant=_refuse)


def _refuse(token: str) -> None:
    raise Broken(f"{token} is no JSON")


def check_text(shown: str) -> None:
    bad = next((s for s in output.visible(shown).split("\n") if not s.isprintable()), None)
    if bad is not None:
        raise Broken(f"a control character reaches the terminal: {bad[:300]!r}")
    if FORGERY in shown:
        raise Broken("a text of the input begins a line of its own")


def attempt(step: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a step, or the RopextError, whose sentence is checked."""
    try:
        return step(*args, **kwargs)
    except RopextError as error:
        check_sentence(str(error))
        return error


def resident(name: str, anew: bool = False) -> int:
    """Return VmRSS (now) or VmHWM (highest since it was reset with `anew`) in bytes; 0 if this is
    not Linux."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if anew:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    lines = status.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def lay_out(directory: Path, item: Input) -> dict[str, bytes]:
    """Write the checkpoint with its spoiled file; only files that differ are written."""
    directory.mkdir(exist_ok=True)
    before, files = _files(directory), seeds.good_files() | {item.file: item.data}
    for name in before.keys() - files:
        (directory / name).unlink()
    for name, content in files.items():
        if before.get(name) != content:
            (directory / name).write_bytes(content)
    return files


def run(item: Input, room: Path, tally: Tally) -> str:
    """Take one input through inspect, plan, verify's file checks and, for some inputs, extend."""
    directory = room / "base"
    before = lay_out(directory, item)
    with guarded():
        start, held = time.perf_counter(), resident("VmRSS", anew=True)
        outcome = _steps(item, directory, room, tally)
        tally.slowest = max(tally.slowest, time.perf_counter() - start)
        grown = resident("VmHWM") - held
        tally.largest = max(tally.largest, grown)
        if grown > LARGEST_GROWTH:
            raise Broken(f"it took {grown:,} bytes of memory")
    if _files(directory) != before or set(os.listdir(room)) - {"out"} != {"base"}:
        raise Broken("something beside the output was changed")
    shutil.rmtree(room / "out", ignore_errors=True)
    tally.outcomes[f"{item.file}: {outcome}"] += 1
    return outcome


def _steps(item: Input, directory: Path, room: Path, tally: Tally) -> str:
    look(directory)
    served = attempt(lambda: inspecting.read_unchanged(inspecting.open_model(str(directory))))
    if isinstance(served, inspecting.Served):
        check_json(served.to_json())
        check_text(text.served_details(served))
    _check_files(directory)
    made = attempt(inspecting.plan, str(directory), **item.options)
    if isinstance(made, RopextError):
        tally.sentences[_shape(str(made))] += 1
        outcome = f"refused ({type(made).__name__})"
    else:
        check_plan(made)
        outcome = "planned"
        if item.file == "config.json" and isinstance(made, Plan):
            tally.planned.append((json.loads(item.data), made))
    if item.extend:
        options = {"no_verify": True, "hash": True} | item.options
        done = attempt(ropext.extend, str(directory), room / "out", **options)
        if isinstance(done, RopextError):
            if (room / "out").exists():
                raise Broken("a failed extend left an output")
            return f"{outcome}, extension refused ({type(done).__name__})"
        check_json(done.to_json())
        check_text(text.extension_text(done.plan, done.written))
        if read_record(room / "out") is None:
            raise Broken("no record")
        return f"{outcome}, extended"
    return outcome


def _shape(sentence: str) -> str:
    """Return a sentence without its names and numbers, for counting kinds."""
    words = sentence.partition("config.json")[2] if "config.json" in sentence else sentence
    return " ".join(w for w in words.split() if w.isalpha())[:60]


def look(directory: Path) -> None:
    seen = attempt(inspecting.inspect, str(directory))
    if isinstance(seen, inspecting.Inspection):
        check_json(seen.to_json())
        check_text(text.inspection_text(seen))


def _check_files(directory: Path) -> None:
    """Run verify's checks that need no model, and its repair."""
    snapshot = attempt(open_snapshot, str(directory), weights=True)
    if isinstance(snapshot, RopextError):
        return
    for problem in families.check_spellings(snapshot.config):
        check_sentence(problem.sentence)
    record = attempt(read_record, directory)
    model = attempt(families.read, snapshot.config)
    attempt(verification.repair, directory)
    if isinstance(model, RopextError) or isinstance(record, RopextError):
        return
    claimed = attempt(claim_of, snapshot, model, record, None)
    if isinstance(claimed, RopextError):
        return
    depth = Depth(deep=True)
    subject = RotarySubject(snapshot, record, claimed[0], None, depth, model)
    lengths = attempt(lambda: [*check_lengths(subject)])
    weights = attempt(lambda: [*check_weights(subject)])
    for found in (lengths, weights):
        for check in found if isinstance(found, list) else ():
            check_sentence(check.sentence)


def check_plan(plan: ExtensionPlan) -> None:
    """Check that a plan is finite, can be printed, and that its config reads back as planned."""
    check_json(plan.to_json())
    check_text(text.plan_details(plan))
    if not isinstance(plan, Plan):
        return
    for warning in plan.warnings:
        if not warning.isprintable():
            raise Broken(f"unprintable warning {warning[:300]!r}")
    again = families.read(json.loads(json.dumps(plan.config, allow_nan=False)))
    spectra = {site.label: site.rope.spectrum for site in again.sites}
    for site in plan.sites:
        check_spectrum(site.wanted.inv_freq, site.wanted.attention_factor)
        read = spectra.get(site.label)
        if site.label.startswith("theta "):
            continue  # named after the theta, which an extension may change
        if read is None or not forms.same(read, site.wanted):
            raise Broken(f"site {site.label!r} of {plan.model.text_type} reads back otherwise")


def check_spectrum(inv_freq: tuple[float, ...], attention: float) -> None:
    if not all(0 <= f < math.inf for f in inv_freq) or not 0 < attention < math.inf:
        raise Broken(f"not a spectrum: {inv_freq[:3]}.., attention {attention}")
