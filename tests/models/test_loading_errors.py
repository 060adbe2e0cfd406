"""If a model does not load, its class decides whether the requested attention is the reason."""

import pytest

from ropext.base.errors import InputError, UsageError
from ropext.files.checkpoint import open_snapshot
from ropext.models.load import Loading, load_model, loading_errors


@pytest.fixture(scope="module")
def demo():
    return open_snapshot("ropext://demo")


def test_an_attention_that_the_class_does_not_have_is_the_options_fault(demo):
    with pytest.raises(UsageError, match="--attn-implementation nonsense: "):
        load_model(demo, Loading(attention="nonsense"))


@pytest.mark.parametrize("error", [ValueError("attn_implementation"), ImportError("a package")])
def test_other_failures_keep_their_kind_whatever_the_message(demo, error):
    with (
        pytest.raises(InputError, match="cannot be loaded as a causal language model"),
        loading_errors(demo, Loading(attention="sdpa")),
    ):
        raise error
