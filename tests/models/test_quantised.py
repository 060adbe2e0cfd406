"""An error of a quantisation library is one sentence that names the library.

The libraries are not needed here: a function of a module with such a name raises what bitsandbytes
0.50.2 and gptqmodel 7.7.0 raised (benchmarks/results/quantised-weights-2026-11-28.md).
"""

import pytest
import torch

import ropext
from ropext.base.bundled import MODELS
from ropext.base.errors import Stopped, UnsupportedModel
from ropext.files.checkpoint import open_snapshot
from ropext.models.load import Loading, loading_errors, memory_errors

NOT_A_LIBRARY = "bitsandbytes_of_mine.functional"


def raising(module: str, error: Exception):
    """Return a function of a module, which raises an error."""
    names = {"__name__": module, "error": error}
    exec(compile("def forward(*inputs):\n    raise error", "functional.py", "exec"), names)
    return names["forward"]


@pytest.mark.parametrize(
    "module", ["bitsandbytes.functional", "torchao", "transformers.quantizers"]
)
def test_an_error_inside_a_quantisation_library_names_it(module):
    fails = raising(module, AssertionError("N must be divisible by block_n."))
    named = rf"{module.split('.')[0]}[ .\d]* fails with .* weights: N must be divisible by block_n;"
    with pytest.raises(UnsupportedModel, match=named), memory_errors("out of memory"):
        fails()


def test_an_error_that_torch_raises_for_the_library_is_the_librarys():
    names = {"__name__": "torchao.linear", "torch": torch}
    exec("def forward():\n    torch.nn.functional.cross_entropy(torch.ones(2), 'x')", names)
    with pytest.raises(UnsupportedModel, match=r"torchao.* fails with"), memory_errors(""):
        names["forward"]()


def test_another_modules_error_keeps_its_traceback():
    fails = raising(NOT_A_LIBRARY, AssertionError("of ours"))
    with pytest.raises(AssertionError, match="of ours"), memory_errors("out of memory"):
        fails()


def test_a_library_that_runs_out_of_memory_is_out_of_memory():
    fails = raising("bitsandbytes.functional", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(Stopped, match="smaller"), memory_errors("out of memory: take smaller ones"):
        fails()


def test_a_library_that_cannot_load_a_model_is_named():
    demo = open_snapshot("ropext://demo")
    fails = raising("gptqmodel.utils", ValueError("requests 2 workers but has 1"))
    with pytest.raises(UnsupportedModel, match="gptqmodel"), loading_errors(demo, Loading()):
        fails()


def test_an_evaluation_names_the_library_that_cannot_compute():
    """The first pass of a model is a probe, before any document."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODELS["ropext://demo"])
    linear = model.model.layers[0].self_attn.q_proj
    linear.forward = raising("bitsandbytes.functional", AssertionError("N must be divisible"))
    with pytest.raises(UnsupportedModel, match=r"bitsandbytes .*N must be divisible"):
        ropext.evaluate(model, data="ropext://held-out", lengths="256", max_docs=2)
