"""Record a command's whole answer as text: its output, its exit code, and every file that it wrote.

Numbers are compared within a tolerance, since processors differ in the last digits of a matrix
product; all else is compared letter by letter.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from command_line import drive

from golden.cases import CASES, Case, write_inputs

RELATIVE = 1e-4  # rounding of a printed number between two machines
ABSOLUTE = 2e-6
# Seconds, dates, free memory, and what names a machine or a version.
_VOLATILE = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)?"), "DATE"),
    (re.compile(r"\b\d{4}-\d\d-\d\d\b"), "DATE"),
    (re.compile(r"\b(\d+ (h|min) )?\d+(\.\d+)? (s|ms|min|h)\b(?! tokens)"), "TIME"),
    (re.compile(r"\d+(\.\d+)? [GM]i?B of memory at the peak"), "MEMORY at the peak"),
    (re.compile(r'((?:variants/|"store": ")[\w+-]+-)[0-9a-f]{16}'), r"\1KEY"),
    (re.compile(r'("[\w/.-]+\.\w+": ")[0-9a-f]{64}'), r"\1SHA-256"),  # files name versions
)
# One bit of a learned number is enough for another digest, and for another pair of the proof to be
# the worst one; the numbers themselves are compared.
_OF_LEARNED = (
    (
        re.compile(r'("(?:weights_sha256|digest|ropext)": "|spectrum \(SHA-256\) \| )[0-9a-f]{64}'),
        r"\1DIGEST",
    ),
    (re.compile(r'"pair": \d+,\n( *)"wanted": .*\n *"found": .*\n'), r'"pair": WORST,\n'),
)
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")


def record(folder: Path, cases: Sequence[Case] = CASES) -> Iterator[tuple[Case, str]]:
    """Yield every case with its transcript, all in one interpreter, which draws every picture
    whole."""
    write_inputs(folder)
    answers = drive(folder, [case.words for case in cases], before="")
    for case, answer in zip(cases, answers, strict=True):
        yield case, _transcript(case, folder, *answer)


def _transcript(case: Case, folder: Path, code: int, out: str, err: str) -> str:
    parts = [f"$ ropext {case.line}", f"exit {code}"]
    parts += ["--- stdout", out, "--- stderr", err]
    if case.output is not None:
        parts += _files(folder / case.output, case.shown)
    text = steady("\n".join(parts), folder)
    if case.learned:
        for pattern, name in _OF_LEARNED:
            text = pattern.sub(name, text)
    return text


def steady(text: str, folder: Path) -> str:
    """Return the text without the parts that change from run to run."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, name in _VOLATILE:
        text = pattern.sub(name, text)
    # The number of progress lines depends on the machine.
    kept = [line.rstrip() for line in text.splitlines() if "TIME left" not in line]
    return "\n".join(kept) + "\n"


def _files(output: Path, shown: tuple[str, ...]) -> list[str]:
    """Return the names of an output's files, and the content of the `shown` ones."""
    names = [p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()]
    parts = ["--- files", *sorted(names)]
    for name in shown:
        parts += [f"--- {output.name}/{name}", _content(output / name)]
    return parts


def _content(path: Path) -> str:
    if path.suffix == ".safetensors":
        return _tensors(path)
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        text = json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    return text


def _tensors(path: Path) -> str:
    """Return name, dtype, shape and norm of every tensor."""
    from safetensors.torch import load_file

    return "\n".join(
        f"{name} {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} {t.double().norm():.9g}"
        for name, t in sorted(load_file(path).items())
    )


def differences(
    found: str, wanted: str, relative: float = RELATIVE, absolute: float = ABSOLUTE
) -> list[str]:
    """Return the lines that differ by more than rounding."""
    ours, theirs = found.splitlines(), wanted.splitlines()
    out = [f"{len(ours)} lines, were {len(theirs)}"] if len(ours) != len(theirs) else []
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if not _same(one, other, relative, absolute):
            out.append(f"line {number}\n  now {one[:300]}\n  was {other[:300]}")
    return out


def merged(found: str, wanted: str) -> str:
    """Return the new transcript with the old lines if they differ by rounding alone.

    So its difference from the old transcript shows only intended changes.
    """
    ours = found.splitlines()
    theirs = wanted.splitlines()
    matcher = difflib.SequenceMatcher(
        None,
        [_NUMBER.sub("#", line) for line in theirs],
        [_NUMBER.sub("#", line) for line in ours],
        autojunk=False,
    )
    for block in matcher.get_matching_blocks():
        for k in range(block.size):
            old = theirs[block.a + k]
            if _same(ours[block.b + k], old, RELATIVE, ABSOLUTE):
                ours[block.b + k] = old
    return "\n".join(ours) + "\n" * found.endswith("\n")


def _same(one: str, other: str, relative: float, absolute: float) -> bool:
    if one == other:
        return True
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(
        a == b
        or _rounded(a, b)
        or math.isclose(float(a), float(b), rel_tol=relative, abs_tol=absolute)
        for a, b in pairs
    )


def _rounded(one: str, other: str) -> bool:
    """Return whether two printed decimals are neighbours in their last digit."""
    if "." not in one or "e" in (one + other).lower():
        return False
    places = len(one.partition(".")[2])
    return (
        len(other.partition(".")[2]) == places
        and abs(float(one) - float(other)) < 1.5 * 10**-places
    )
