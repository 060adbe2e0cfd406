"""`plan X` shows what `extend X` with the same words does: the same edits, or the same refusal."""

import json

import pytest
from gguf_files import ggml, making

from ropext.base.errors import RopextError, UnsupportedModel
from ropext.base.narration import NOBODY
from ropext.families.loaders import gguf
from ropext.files import inspecting
from ropext.pipeline import extending, public

WINDOWS = {"attention.sliding_window": 32, "attention.sliding_window_pattern": [True, False]}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
}
# Further keys in the file, next to a Llama's, and the words of the command.
FILES = {"scaled": YARN, "windows": WINDOWS, "plain": {}}
WORDS = (
    {"factor": 2.0, "for_loaders": ("llama.cpp",), "context": 128, "original_context": 64},
    {"target": 1024, "from_original": True},
    {"factor": 2.0, "even_so": True},
    {"factor": 2.0, "length_only": True},
)


def answer(work):
    """Return a command's answer, or the sentence with which it refuses."""
    try:
        return work(), ""
    except RopextError as error:
        return None, str(error)


# A family without windows, a family whose windows no scaling can help, and a family without
# divisors.
FEW = ("llama", "cohere2", "qwen3")
OTHERS = sorted({*gguf._table()["architectures"]} - {*FEW})


@pytest.mark.parametrize(
    "arch", [*FEW, *(pytest.param(arch, marks=pytest.mark.slow) for arch in OTHERS)]
)
def test_a_file_is_planned_as_it_is_extended(tmp_path, arch):
    files = FILES if arch in FEW else {"scaled": YARN}
    for name, more in files.items():
        path = tmp_path / f"{name}.gguf"
        making.write(path, arch, making.LLAMA | more, data=making.tensors())
        before = ggml.keys(path)
        for number, words in enumerate(WORDS):
            out = tmp_path / f"{name}{number}.gguf"
            plan, refused = answer(lambda: inspecting.plan(str(path), **words))  # noqa: B023
            if plan is not None and plan.refusal is not None:
                refused = str(plan.refusal)
            done, said = answer(lambda: public.extend(str(path), out, **words))  # noqa: B023
            assert said == refused, words
            if done is None:
                continue
            edits = {edit.key: edit.after for edit in plan.edits}
            after = ggml.keys(out)
            changed = {key for key in after if after[key] != before.get(key)}
            named = {key for key in changed if not key.startswith(("ropext.", "general."))}
            assert named <= edits.keys(), words
            assert done.plan.recipe == plan.recipe
            assert done.plan.method == plan.method


def test_plan_and_extend_refuse_a_directory_that_scaling_cannot_help_alike(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(
        json.dumps(
            {
                "model_type": "cohere2",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
                "max_position_embeddings": 512,
                "sliding_window": 64,
            }
        ),
        "utf-8",
    )
    plan = inspecting.plan(str(base), factor=2.0)
    job = extending.prepare_extension(str(base), {"factor": 2.0}, None)
    with pytest.raises(UnsupportedModel) as caught:
        job.make(tmp_path / "out", NOBODY)
    assert str(caught.value) == str(plan.refusal)
