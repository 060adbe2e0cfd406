"""Every fact that decides a store of readings is in its name: an equal store is not read again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents

from ropext.base.workdir import Workdir
from ropext.evaluation.evaluation import Evaluation
from ropext.evaluation.lineup import line_up
from ropext.files.checkpoint.digests import Digests
from ropext.options.evaluate import Evaluate
from ropext.pipeline.public import evaluate


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores")
    write_checkpoint(path / "model")
    write_checkpoint(path / "other", seed=1)
    write_documents(path / "docs.jsonl")
    return path


def decides(**changes):
    own = {"schema": 1, "context": 64, "lengths": [64, 128], "bos": 1}
    return own | {"tokenizer_sha256": "t", "versions": {"torch": "2"}} | changes


def names(tmp, model="model", options=(), reading=(), **changes):
    lineup = line_up(str(tmp / model), None, Evaluate(data="any", **dict(options)))
    read = Evaluate(data="any", **dict(reading))
    variants = lineup.contents(Digests(), trust_remote_code=False)
    place = Workdir(Path("out"), "eval", decides(variants=variants, **changes))
    return Evaluation.stores(SimpleNamespace(lineup=lineup, options=read), place)


def test_the_name_of_a_store_depends_on_all_that_decides_its_losses(place):
    methods = {"method": "pi,yarn", "factor": "4"}
    usual = names(place, options=methods)
    assert list(usual) == ["base", "untouched", "pi-4x", "yarn-4x"]
    assert len({*usual.values()}) == 4
    changed = [
        names(place, "other", methods),
        names(place, options=methods, versions={"torch": "3"}),
        names(place, options=methods, context=32),
        names(place, options=methods, bos=None),
        names(place, options=methods, short_window=3),
        names(place, options=methods, masking={"token": 3}),
        names(place, options=methods, reading={"dtype": "bfloat16"}),
    ]
    everyone = [name for own in (usual, *changed) for name in own.values()]
    assert len({*everyone}) == len(everyone)
    # Documents and questions name the files; who else is read changes nothing.
    assert names(place, options={"method": "pi", "factor": "4"}, lengths=[256]).items() <= (
        usual.items()
    )


def test_a_run_with_other_settings_reads_only_new_data_and_leaves_no_other_files(place, tmp_path):
    """The figures equal those from an empty folder, to the byte."""

    def read(path, methods, **more):
        asked = {"method": methods, "factor": "4", "lengths": LENGTHS, "tasks": "copy", **more}
        asked |= {"data": str(place / "docs.jsonl"), "items": 1, "haystack": "noise"}
        done = evaluate(str(place / "model"), path, force=True, **asked)
        return done, {p: p.stat().st_mtime_ns for p in (path / "variants").rglob("*.*")}

    _, first = read(tmp_path / "run", "pi,yarn", depths="0.2")
    again, second = read(tmp_path / "run", "pi,ntk", depths="0.2,0.8")
    fresh, third = read(tmp_path / "fresh", "pi,ntk", depths="0.2,0.8")
    written = (tmp_path / "run/results.json").read_bytes()
    assert written == (tmp_path / "fresh/results.json").read_bytes()
    relative = sorted(path.relative_to(tmp_path / "fresh") for path in third)
    assert sorted(path.relative_to(tmp_path / "run") for path in second) == relative
    same = {path for path, when in second.items() if first.get(path) == when}
    arrays = {p for p in second if p.suffix == ".npy" and "ntk" not in p.parts[-3]}
    assert same == arrays
    assert (len(arrays), again.resumed, fresh.resumed) == (3 * 9, 3 * 9, 0)


def test_a_run_is_of_the_code_that_was_run(tmp_path):
    """Where a model's own code is trusted; else none of it has a part in the numbers."""
    write_checkpoint(tmp_path / "model")
    code = tmp_path / "model" / "modeling_mine.py"
    found = []
    for text in ("SCALE = 1.0", "SCALE = 0.1"):
        code.write_text(text)
        lineup = line_up(str(tmp_path / "model"), None, Evaluate(data="any"))
        found.append([lineup.contents(Digests(), trusted) for trusted in (True, False)])
    (before, plain), (after, still_plain) = found
    assert before["base"]["model"]["code_sha256"] != after["base"]["model"]["code_sha256"]
    assert plain == still_plain
