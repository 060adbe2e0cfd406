"""What `extend` prints of its proof goes by the proof's fields, not by their words."""

import pytest

from ropext.results.report import text

PROVED = {
    "transformers": "5.0",
    "tensors_compared": 38,
    "tensors_not_compared": 0,
    "rotary_modules": 1,
    "attention_modules": 4,
    "worst": {"error": 1e-7},
}
BEGINNING = (
    "verified with transformers 5.0: it loads 38 tensors; the RoPE and attention settings of 5 "
    "modules match the plan (largest relative error "
)


@pytest.mark.parametrize(
    ("forward", "agrees", "end"),
    [
        ("any words", True, "; a forward pass matches, too"),
        ("it equals the base's, or so", False, "; it equals the base's, or so"),
        ("", False, ""),
    ],
)
def test_a_forward_pass_that_agrees_is_named_and_another_has_its_own_sentence(forward, agrees, end):
    proof = PROVED | {"forward": forward, "forward_agrees": agrees}
    assert text._proof_sentence(proof, "OUT") == f"{BEGINNING}1.0e-07){end}"
