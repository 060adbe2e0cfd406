"""lm-evaluation-harness on the model that is loaded already: short-context regressions."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropext.errors import UsageError

if TYPE_CHECKING:
    from ropext.evaluation.options import Options
    from ropext.evaluation.variants import Variant


def run_tasks(
    model: Any, tokenizer: Any, options: "Options", length: int, variants: Sequence["Variant"]
) -> dict[str, Any]:
    """Per variant and task the harness's own metrics.

    The context length is passed on, since the harness cuts longer prompts from the left with no
    more than a warning; log-softmax is taken in float32, not in the dtype of the weights.
    """
    from ropext.evaluation.variants import applied

    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UsageError(
            f"--lm-eval needs lm-evaluation-harness: pip install 'ropext[lm-eval]' ({error})"
        ) from error
    # The harness runs code that comes with a dataset when this is set; it stays off.
    os.environ.pop("HF_DATASETS_TRUST_REMOTE_CODE", None)
    results: dict[str, Any] = {}
    for variant in variants:
        if variant.is_base:
            continue
        with applied(model, variant):
            wrapped = HFLM(
                pretrained=model,
                tokenizer=tokenizer,
                max_length=length,
                batch_size=1,
                softmax_dtype="float32",
            )
            found = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(options.lm_eval),
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
            )
        results[variant.label] = (found or {}).get("results", {})
    return results
