"""Spoiled GGUF files: a result, or one printable sentence, and nothing written but the output.

GGUF_INPUTS=5000 python -m pytest tests/gguf_files/test_spoiled.py
"""

import os
import shutil
import struct
from random import Random

import numpy as np
import pytest
from fuzz import campaign
from gguf_files import making, test_architectures

import ropext
from ropext.base.errors import RopextError
from ropext.files import inspecting
from ropext.files.gguf.header import read_gguf
from ropext.results.report import text
from ropext.verifying import verification

INPUTS = int(os.environ.get("GGUF_INPUTS", "300"))
NUMBERS = (0, 1, 2, 7, 32, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
METHODS = ({}, {"method": "pi"}, {"method": "ntk"}, {"method": "llama3"}, {"from_original": True})


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    room = tmp_path_factory.mktemp("seeds")
    factors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)} | making.tensors()
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    yarn |= {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.1}
    gemma = making.LLAMA | {"attention.sliding_window": 32, "rope.freq_base_swa": 10_000.0}
    longrope = {"rope_factors_long.weight": np.ones(8, np.float32) * 2} | factors
    longrope["rope_factors_short.weight"] = longrope.pop("rope_freqs.weight")
    files = [
        making.write(room / "a.gguf"),
        making.write(room / "b.gguf", data=factors),
        making.write(room / "c.gguf", "qwen2", metadata=making.LLAMA | yarn),
        making.write(room / "d.gguf", "gemma3", metadata=gemma),
        making.write(room / "e.gguf", "phi3", metadata=making.LLAMA | yarn, data=longrope),
        making.write(room / "f.gguf", "mistral3", metadata=making.LLAMA | yarn),
    ]
    for arch in test_architectures.NEW:
        files.append(test_architectures.made(room / f"{arch}.gguf", arch))
    blob = test_architectures.BLOB | {"rope.global.freq_base": 1e6, "context_length": 131_072}
    files.append(making.write(room / "blob.gguf", "gemma3", metadata=blob))
    ropext.extend(str(files[0]), room / "g.gguf", factor=4.0)
    return [(path, read_gguf(path)) for path in [*files, room / "g.gguf"]]


def spoiled(random, path, header):
    """Make one to three changes of the header, some at the places that do most harm."""
    data = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 3)):
        kind, entry = random.random(), random.choice(list(header.entries.values()))
        if kind < 0.3:  # a value, of the same length
            data[entry.end - 4 : entry.end] = random.choice(
                [struct.pack("<f", random.choice((0.0, -1.0, 1e30, float("nan"), 0.5, 3.7)))]
                + [struct.pack("<I", number & 0xFFFFFFFF) for number in NUMBERS]
            )
        elif kind < 0.5:  # a count, a length or an offset
            place = random.choice((8, 16, entry.start, random.randrange(24, header.data - 8)))
            data[place : place + 8] = struct.pack("<Q", random.choice(NUMBERS))
        elif kind < 0.7:
            data[random.randrange(header.data)] = random.randrange(256)
        elif kind < 0.8:
            del data[random.randrange(len(data)) :]
            break
        elif kind < 0.9:  # a part twice, or gone
            first, last = sorted(random.randrange(header.data) for _ in range(2))
            data[first:last] = data[first:last] * random.choice((0, 2))
        else:  # a divisor or another number of a tensor
            place = random.randrange(header.data, max(header.end, header.data + 1))
            data[place : place + 4] = os.urandom(0) or random.randbytes(4)
    return bytes(data)


def test_spoiled_files_keep_the_promise(seeds, tmp_path):
    base, out = tmp_path / "base.gguf", tmp_path / "out.gguf"
    outcomes = {"planned": 0, "extended": 0, "refused": 0}
    for number in range(INPUTS):
        random = Random(number)
        content = spoiled(random, *random.choice(seeds))
        base.write_bytes(content)
        with campaign.guarded():
            seen = campaign.attempt(inspecting.inspect, str(base))
            if not isinstance(seen, RopextError):
                campaign.check_json(seen.to_json())
                shown = text.inspection_text(seen)
                campaign.check_text(shown)
            campaign.attempt(lambda: inspecting.read_unchanged(inspecting.open_model(str(base))))
            campaign.attempt(verification.verify, str(base), deep=True)
            options = {"factor": 4.0} | random.choice(METHODS)
            made = campaign.attempt(inspecting.plan, str(base), **options)
            if isinstance(made, RopextError):
                outcomes["refused"] += 1
            else:
                outcomes["planned"] += 1
                campaign.check_json(made.to_json())
                campaign.check_text(text.plan_details(made))
                done = campaign.attempt(ropext.extend, str(base), out, **options)
                if not isinstance(done, RopextError):
                    outcomes["extended"] += 1
                    assert verification.verify(out, against=str(base), deep=True).passed
                    out.unlink()
                    (tmp_path / "out.gguf.Modelfile").unlink()
        assert base.read_bytes() == content
        assert os.listdir(tmp_path) == ["base.gguf"], number
    print(outcomes)
    assert min(outcomes.values()) > INPUTS // 50
    shutil.rmtree(tmp_path)
