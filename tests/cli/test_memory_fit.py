"""What fits into a memory: counted by hand from a config's numbers, and at the edge itself."""

import json

import pytest
from gguf_files import making

from ropext.files.inspecting import memory_fit
from ropext.options.memory import CACHE_NAMES, MemoryOptions, memory_bytes
from ropext.planning.memory import CACHE_TYPES

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
# Keys and values of two heads of 64 numbers in three layers.
VALUES = 2 * 2 * 64 * 3
BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32, "fp8": 1.0}


def config(folder, **keys):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | keys))
    return folder


def index(folder, total):
    about = {"metadata": {"total_size": total}, "weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(about))


def fits(place, memory, length=None, **options):
    return memory_fit(place, MemoryOptions(memory=memory, **options), length=length, revision=None)


def test_the_names_of_kv_caches_are_those_of_the_table():
    assert tuple(CACHE_TYPES) == CACHE_NAMES == tuple(BYTES)


@pytest.mark.parametrize("cache", CACHE_NAMES)
@pytest.mark.parametrize("parallel", [1, 3])
def test_the_longest_length_is_the_last_step_that_fits(tmp_path, cache, parallel):
    place = config(tmp_path / "model")
    index(place, 100 << 20)
    found = fits(place, "1G", kv=[cache], parallel=parallel)
    (row,) = found.rows
    assert row.bytes_at_length == parallel * 4096 * VALUES * BYTES[cache]
    room = (1024 - 100) << 20
    one = parallel * VALUES * BYTES[cache]
    assert row.longest % 256 == 0
    assert row.longest * one <= room < (row.longest + 256) * one
    assert row.fits


def test_a_window_takes_its_window_and_no_more(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    keys = {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}
    place = config(tmp_path / "model", layer_types=kinds, **keys)
    index(place, 1 << 20)
    (row,) = fits(place, "1G", kv=["f16"], length=1000).rows
    assert row.bytes_at_length == 2 * (VALUES // 3) * (1000 + 128 + 128)


def test_a_file_is_counted_in_the_steps_of_llama_cpp(tmp_path):
    making.write(tmp_path / "m.gguf")
    found = fits(tmp_path / "m.gguf", "1G", length=1000)
    weights = making.tensors().values()
    assert found.weights == sum(one.nbytes for one in weights)
    values = 2 * 2 * 16 * 2  # two layers, two heads of 16 numbers
    known = {row.cache: row.bytes_at_length for row in found.rows}
    assert known == {"f16": 1024 * values * 2, "q8_0": 1024 * values * 34 // 32} | {
        "q4_0": 1024 * values * 18 // 32
    }
    short = fits(tmp_path / "m.gguf", "1G", kv=["q8", "q4"], length=1000)  # as most people type
    assert {row.cache: row.bytes_at_length for row in short.rows} == {
        name: known[name] for name in ("q8_0", "q4_0")
    }


def test_the_plan_of_a_file_counts_its_cache_as_the_table_does(tmp_path, ropext):
    windows = making.LLAMA | {"attention.sliding_window": 100}
    making.write(tmp_path / "m.gguf", "gemma2", windows)
    code, out, err = ropext("plan", str(tmp_path / "m.gguf"), "--target", "1000", "--memory", "1G")
    assert code == 0, err
    # One of two layers is windowed: 1,024 cells, and 768 for 100 tokens and a micro-batch of 512.
    values = 2 * 2 * 16
    taken = (1024 + 768) * values * 2 / 1024
    assert f"{taken:.4g} KiB for one sequence" in out
    assert f"  {taken:.4g} KiB" in out.partition("per token")[2]


def cells_of_windows(command, window):
    """Count the cells as src/llama-kv-cache-iswa.cpp does for this command line (b9026).

    llama-server without -np takes 4 slots and one unified cache, with -np a cache for each slot.
    """
    words = command.split()
    length = int(words[words.index("-c") + 1])
    slots = int(words[words.index("-np") + 1]) if "-np" in words else 4
    seen = window * slots if "-np" not in words else window
    padded = -(-min(length // slots if "-np" in words else length, seen + 512) // 256) * 256
    return padded * (slots if "-np" in words else 1)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_windowed_file_is_counted_as_the_printed_line_allocates_it(tmp_path, ropext, parallel):
    windows = making.LLAMA | {"attention.sliding_window": 1024, "context_length": 8192}
    making.write(tmp_path / "m.gguf", "gemma2", windows)
    given = ("--memory", "1G", "--kv", "f16", "--parallel", str(parallel), "--json")
    code, out, err = ropext("plan", str(tmp_path / "m.gguf"), "--target", "16384", *given)
    assert code == 0, err
    plan = json.loads(out)
    memory = plan["memory"]
    assert memory["flags"] == f"-c {parallel * 16384} -np {parallel}"
    windowed = cells_of_windows(memory["flags"], 1024)
    assert windowed == parallel * 1536
    values = 2 * 2 * 16
    (row,) = memory["rows"]
    assert row["bytes_at_length"] == (parallel * 16384 + windowed) * values * 2
    lines = [one["command"] for one in (*plan["serving"], *plan["overrides"])]
    servers = [line for line in lines if line.startswith("llama-server")]
    assert len(servers) == 2
    assert all(cells_of_windows(line, 1024) == 1536 for line in servers)


def test_a_cache_that_no_program_of_files_has_is_refused(tmp_path, ropext):
    making.write(tmp_path / "m.gguf")
    code, _, err = ropext("plan", str(tmp_path / "m.gguf"), "--memory", "1G", "--kv", "fp8")
    assert code == 2
    assert "no program that runs a GGUF has it" in err


def test_unknown_facts_are_not_guessed(tmp_path, ropext):
    code, out, _ = ropext("plan", str(config(tmp_path / "model")), "--memory", "1G")
    assert code == 0
    assert "not known whether 4,096 tokens fit: there are no weights here" in out
    assert out.count("not known") >= 1 + len(CACHE_NAMES)
    assert "12 MiB" not in out.splitlines()[0]
    # Keys and values of 10 numbers fill no block of 32.
    odd = config(tmp_path / "odd", hidden_size=40, num_key_value_heads=1, num_hidden_layers=1)
    index(odd, 1)
    said = {row.cache: row.longest for row in fits(odd, "1G").rows}
    assert said["q8_0"] is said["q4_0"] is None
    assert said["f16"]


def test_plan_memory_begins_with_the_tokens_that_fit(tmp_path, ropext):
    place = config(tmp_path / "model")
    index(place, 1000 << 20)
    # 24 MiB are left; 4,096 tokens take 6 MiB in f16, 16,384 take 24.
    first = ropext("plan", str(place), "--memory", "1G")[1].splitlines()[0]
    assert first == "4,096 tokens fit into 1 GiB with a KV cache of f16 or q8_0 or q4_0 or fp8"
    words = ("plan", str(place), "--factor", "8", "--method", "yarn", "--memory", "1G")
    code, out, _ = ropext(*words)
    assert code == 0
    assert "32,768 tokens fit into 1 GiB with a KV cache of q4_0 or fp8" in out
    told = json.loads(ropext(*words, "--json")[1])["memory"]
    assert {row["cache"]: row["fits"] for row in told["rows"]} == {
        "f16": False,
        "q8_0": False,
        "q4_0": True,
        "fp8": True,
    }
    assert "do not fit" in ropext("plan", str(place), "--memory", "1001M")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("12G", 12 << 30), ("1.5GiB", 3 << 29), ("8000MB", 8000 << 20), ("1t", 1 << 40)],
)
def test_memory_bytes_parses_an_amount_of_memory(text, wanted):
    assert memory_bytes(text) == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "12"), "12 gigabytes are 12G"),
        (("--memory", "lots"), "write 12G or 12GiB"),
        (("--memory", "1G", "--kv", "q9"), "known are f16, q8_0, q4_0, fp8"),
        (("--kv", "f16"), "add --memory SIZE"),
        (("--memory", "1G", "--measure", "texts"), "do not go together"),
        (("--memory", "1G", "--factor", "2", "--plot", "p.png"), "do not go together"),
    ],
)
def test_an_impossible_question_gives_one_sentence(tmp_path, ropext, words, said):
    code, _, err = ropext("plan", str(config(tmp_path / "model")), *words)
    assert code == 2
    assert said in err
