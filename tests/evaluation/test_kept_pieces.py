"""Pieces of a killed evaluation, damaged in every way: the numbers are those of a whole run."""

import json
import os
import shutil
import signal
from functools import partial

import numpy as np
import pytest
from command_line import Forked
from tiny_checkpoints import LENGTHS, write_checkpoint, write_documents

from ropext.pipeline.public import evaluate

KILLED_AFTER = 26  # pieces
RESULTS = ("results.json", "items.jsonl", "documents.json")
ARRAY, ANSWERS = "pass-256/*.npy", "items/*.json"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model, documents, a whole run, and one that was killed half-way."""
    path = tmp_path_factory.mktemp("pieces")
    write_checkpoint(path / "model")
    write_documents(path / "docs.jsonl")
    measure(path, path / "whole")
    done = []

    def show(read, *_):
        done.extend([1] * bool(read))  # not at its beginning
        if len(done) == KILLED_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)

    killed = Forked(partial(measure, path, path / "killed", show=show), path)
    assert killed.wait()[0] == -signal.SIGKILL
    assert not (path / "killed" / "results.json").exists()
    return path


def measure(place, output, **more):
    asked = {"data": str(place / "docs.jsonl"), "lengths": LENGTHS, "haystack": "noise"}
    asked |= {"method": "pi,yarn", "factor": "4", "tasks": "copy", "items": 1}
    return evaluate(str(place / "model"), output, depths="0.2,0.8", **asked, **more)


def emptied(path):
    path.write_bytes(b"")


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_its_header(path):
    path.write_bytes(path.read_bytes()[:40])


def garbage(path):
    path.write_bytes(os.urandom(path.stat().st_size))


def one_byte_more(path):
    path.write_bytes(path.read_bytes() + b"\n")


def a_folder_s_link(path):
    path.unlink()
    path.symlink_to(path.parent)


def one_loss_changed(path):
    """As an editor of bytes does it: the rest of the file stays, its digest too."""
    content = bytearray(path.read_bytes())
    losses = np.load(path)
    place = content.index(losses.tobytes()) + 4 * 100
    content[place : place + 4] = (losses[100] * 2).tobytes()
    path.write_bytes(content)
    assert np.load(path)[100] == losses[100] * 2


def all_losses_zero(path):
    np.save(path, np.zeros_like(np.load(path)))


def another_document_s(path):
    other = max(path.parent.iterdir())
    assert other != path
    shutil.copy(other, path)


def another_variant_s(path):
    (base,) = path.parents[2].glob("base-*")
    (short,) = base.glob(f"short/{path.name}")
    shutil.copy(short, path)


def as_an_older_version_wrote_it(path):
    if path.suffix == ".npy":
        np.save(path, np.load(path))
    else:
        path.write_text(json.dumps(json.loads(path.read_text())["content"], indent=1) + "\n")


def edited(change):
    def edit(path):
        held = json.loads(path.read_text())
        change(held["content"])
        path.write_text(json.dumps(held))

    return edit


no_items = edited(list.clear)
an_item_removed = edited(list.pop)
an_answer_changed = edited(lambda items: items[0].update(exact=not items[0]["exact"]))
an_item_twice = edited(lambda items: items.__setitem__(1, items[0]))

ANY = (emptied, cut_short, cut_in_its_header, garbage, one_byte_more, a_folder_s_link)
ANY += (as_an_older_version_wrote_it,)
OF_LOSSES = (one_loss_changed, all_losses_zero, another_document_s, another_variant_s)
OF_ANSWERS = (no_items, an_item_removed, an_answer_changed, an_item_twice)
CASES = [(ARRAY, damage) for damage in ANY + OF_LOSSES]
CASES += [(ANSWERS, damage) for damage in ANY + OF_ANSWERS]


@pytest.mark.slow
@pytest.mark.parametrize(("piece", "damage"), CASES)
def test_a_damaged_piece_is_named_and_computed_again(place, tmp_path, piece, damage):
    output = tmp_path / "run"
    shutil.copytree(place / "killed", output)
    path = min(output.glob(f"variants/untouched-*/{piece}"))
    damage(path)
    heard = []
    done = measure(place, output, say=heard.append)
    for name in RESULTS:
        assert (output / name).read_bytes() == (place / "whole" / name).read_bytes(), name
    name = path.relative_to(output).as_posix()
    assert (
        f"{output}: pieces that are not as this version wrote them are computed again: {name}"
        in heard
    )
    assert done.resumed == KILLED_AFTER - 1
    assert path.read_bytes() == (place / "whole" / name).read_bytes()


def test_without_damage_every_piece_is_used(place, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(place / "killed", output)
    heard = []
    assert measure(place, output, say=heard.append).resumed == KILLED_AFTER
    assert not any("again" in sentence for sentence in heard)
