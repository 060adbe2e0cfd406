"""Count the forward tokens of RULER's tasks over shared haystacks, in ropext and in `lm_eval`.

    python benchmarks/ruler_tokens.py --lengths 4096,16384 --items 4

Both read a tiny random model; each counts the tokens that go through its body. Items are the same
number: `--items` times five depths. niah_multikey_1 of lm_eval downloads its essays. If that fails,
its count follows from the size of its prompts: the length less the 128 tokens it then generates (at
most), as measured for its other two tasks. A random model answers nothing right, so every answer
takes all its room, on both sides. Needs lm-eval[ruler].
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ropext.base.bundled import MODELS
from ropext.evaluation.forward import TokenScorer
from ropext.pipeline.public import evaluate

TASKS = ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3")
DEPTHS = 5


def checkpoint(place: Path, longest: int) -> str:
    """Write a random Llama of one layer, with the demo's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=1024, num_attention_heads=2, max_position_embeddings=longest, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(place)
    AutoTokenizer.from_pretrained(MODELS["ropext://demo"]).save_pretrained(place)
    return str(place)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Tokens of every call of a Llama's body."""
    from transformers import LlamaModel

    seen, own = list[int](), LlamaModel.forward

    def forward(self: Any, input_ids: Any = None, *args: Any, **more: Any) -> Any:
        seen.append(int(input_ids.numel()))
        return own(self, input_ids, *args, **more)

    LlamaModel.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        LlamaModel.forward = own  # type: ignore[method-assign]


def ours(model: str, task: str, length: int, items: int) -> int:
    check = TokenScorer.self_check

    def unseen(self: TokenScorer) -> Any:
        """Run the self-check without counting its tokens: it reads 48 for any input."""
        before = len(seen)
        manner = check(self)
        del seen[before:]
        return manner

    TokenScorer.self_check = unseen  # type: ignore[method-assign]
    with counted() as seen:
        evaluate(model, tasks=task, lengths=str(length), items=items)
    TokenScorer.self_check = check  # type: ignore[method-assign]
    return sum(seen)


def theirs(model: str, task: str, length: int, items: int) -> int:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    wrapped = HFLM(pretrained=model, max_length=length, batch_size=1, device="cpu")
    manager = TaskManager(metadata={"pretrained": model, "max_seq_lengths": [length]})
    with counted() as seen:
        lm_eval.simple_evaluate(
            model=wrapped, tasks=[task], task_manager=manager, limit=items, bootstrap_iters=0
        )
    return sum(seen)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--items", type=int, default=4)
    options = parser.parse_args()
    count = options.items * DEPTHS
    print(f"{count} items of each task\n\n| length | task | ropext | lm_eval | ratio |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        lengths = [int(length) for length in options.lengths.split(",")]
        model = checkpoint(Path(place), max(lengths))
        for length in lengths:
            totals = [0, 0]
            for task in TASKS:
                mine, note = ours(model, task, length, options.items), ""
                try:
                    other = theirs(model, task, length, count)
                except Exception as error:  # no network: whatever its downloader raises
                    other, note = count * length, f" (sized, not run: {type(error).__name__})"
                totals = [totals[0] + mine, totals[1] + other]
                print(f"| {length} | {task} | {mine:,} | {other:,}{note} | {other / mine:.2f} |")
            print(
                f"| {length} | all | {totals[0]:,} | {totals[1]:,} | {totals[1] / totals[0]:.2f} |"
            )


main()
