"""Run in its own process on a copy of the package: print the copy's numbers, and the tests that
fail on it.

    python mutant_run.py COPY TESTS KILLER [KILLER ...]

COPY is put first on the path, so that `ropext` is the copy; the killers are test files in TESTS.
The answer is one line of JSON.
"""

import contextlib
import io
import json
import math
import sys
from pathlib import Path

DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 1.0, "softmax_mscale": True}
# As Qwen 2.5 publishes yarn: max_position_embeddings is the extended length.
PUBLISHED = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}


def numbers(name: str, spectrum) -> dict[str, list[float]]:
    factors = [spectrum.attention_factor, spectrum.softmax_factor]
    return {f"{name}: frequencies": list(spectrum.inv_freq), f"{name}: factors": factors}


def spectra() -> dict[str, list[float]]:
    """Return the copy's wanted spectra and its readings of exported dicts, at a few points."""
    from ropext import scaling
    from ropext.base.errors import RopextError
    from ropext.scaling import forms
    from ropext.scaling.rope import Rope

    out = {}
    ropes = {
        "llama2": Rope(128, 1e4, 4096),
        # theta 1e4 and 131072 tokens: the ramp ends beyond dim/2.
        "long": Rope(128, 1e4, 131_072),
        "deepseek": Rope(64, 1e4, 4096, **DEEPSEEK),
    }
    for name, rope in ropes.items():
        for method in ("pi", "ntk", "dynamic", "by-parts", "llama3", "yarn"):
            target = 16 * rope.context
            asked = scaling.scale(rope, method, target, scaling.find(method).knobs(), None)
            wanted = scaling.compose(rope, asked, target)
            out |= numbers(f"{name} {method}, wanted", wanted)
            # ropext refuses an export that does not read back as wanted: some mutants only refuse.
            with contextlib.suppress(RopextError, StopIteration):
                params = next(forms.candidates(rope, wanted, target, scaling.native(rope, asked)))
                out |= numbers(f"{name} {method}, written", forms.read(params, rope).spectrum)
    complete = forms.completed(PUBLISHED, 131_072)
    published = forms.read(complete, Rope(128, 1e6, 32_768)).spectrum
    return out | numbers("published yarn", published) | saved()


def saved() -> dict[str, list[float]]:
    """Return the readings of saved configs by the transcribed readers of transformers 4 and 5."""
    import test_spellings

    from ropext.base.errors import RopextError

    out = {}
    for family in test_spellings.MODELS:
        for method in test_spellings.TRUTHS:
            with contextlib.suppress(RopextError, StopIteration):
                for version, (inv_freq, factor) in test_spellings.seen(family, method).items():
                    name = f"{family} {method}, saved, in {version}"
                    out[f"{name}: frequencies"] = inv_freq
                    out[f"{name}: factors"] = [factor]
    return out


class Killers:
    """Collects what failed first, and how."""

    def __init__(self) -> None:
        self.first: tuple[str, str, str] | None = None

    def pytest_runtest_makereport(self, item, call) -> None:
        if call.excinfo is not None and self.first is None:
            text = str(call.excinfo.value).strip().splitlines() or [""]
            self.first = (item.nodeid, call.excinfo.type.__name__, text[0])

    def pytest_collectreport(self, report) -> None:
        if report.failed and self.first is None:
            self.first = (report.nodeid, "collection", str(report.longrepr)[:400])


def main(copy: str, tests: str, *killers: str) -> None:
    sys.path[:0] = [copy, tests, str(Path(tests, "support"))]
    import pytest

    import ropext

    assert Path(ropext.__file__).is_relative_to(copy), ropext.__file__
    found = spectra()
    watch = Killers()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        files = [str(Path(tests, killer)) for killer in killers]
        options = ["-x", "-q", "--noconftest", "-p", "no:cacheprovider", "--rootdir", tests]
        pytest.main([*options, *files], plugins=[watch])
    finite = {k: v for k, v in found.items() if all(math.isfinite(x) for x in v)}
    print(json.dumps({"spectra": finite, "killer": watch.first}))


if __name__ == "__main__":
    main(*sys.argv[1:])
