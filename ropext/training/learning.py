"""How a model learns: each token from those before it, or masked tokens from all others. The
loop of a training asks nothing else of it; loading, writing and refusing do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ropext.evaluation.reads import NEXT_TOKEN, MaskedTokens, Prediction
from ropext.results.perplexity import MASK_STRIDE
from ropext.training.loss import use_sliced_loss
from ropext.training.rows import MASKED, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.modeling_outputs import MaskedLMOutput

Loss = Callable[..., torch.Tensor]  # as transformers' Trainer calls it


@dataclass(frozen=True)
class NextTokenLearning:
    """The loss is on the next token, of all tokens or those that are scored."""

    prediction: ClassVar[Prediction] = NEXT_TOKEN
    scored: ClassVar[str] = "tokens"  # what held-out losses are over
    notes: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[Loss | None] = None  # None = the model's own
    why_whole: ClassVar[str] = ""  # whether it needs whole logits, the model tells

    def rows(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", seed: int
    ) -> Sequence[Row]:
        """What the model reads, made of rows of text."""
        return rows

    def use_sliced_loss(self, model: "PreTrainedModel") -> str | None:
        """Give a model the loss that needs no whole logits; the reason where it keeps its own and
        that is to be said."""
        return use_sliced_loss(model)


@dataclass(frozen=True)
class MaskedLearning:
    """The loss is on tokens that stock's collator masks."""

    prediction: MaskedTokens
    scored: ClassVar[str] = "masked tokens"
    notes: ClassVar[tuple[str, ...]] = (
        "losses on held-out documents are pseudo-perplexities: each pass masks every "
        f"{MASK_STRIDE}th of the last tokens",
    )
    why_whole: ClassVar[str] = "a masked language model takes its own"

    def rows(
        self, rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", seed: int
    ) -> Sequence[Row]:
        """Text between special tokens, some of it masked."""
        return MaskedRows(rows, tokenizer, self.prediction, seed)

    def use_sliced_loss(self, model: "PreTrainedModel") -> str | None:
        """Few of the tokens are scored, so that stock's loss of whole logits stays."""
        return None

    @property
    def loss(self) -> Loss:
        return _masked_loss


Learning = NextTokenLearning | MaskedLearning
NEXT_TOKEN_LEARNING = NextTokenLearning()


class MaskedRows(Sequence[Row]):
    """Rows of a masked language model: each between special tokens, which take the place of its
    last ones, and with what the stock collator masks, by the seed and its number alone."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: "PreTrainedTokenizerBase",
        prediction: MaskedTokens,
        seed: int,
    ) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.prediction = prediction
        self.seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        from transformers import DataCollatorForLanguageModeling

        row = self.rows[number]
        around = self.prediction
        text = row.ids[: around.text_in(len(row.ids))]
        drawn = int(np.random.default_rng((self.seed, MASKED, number)).integers(2**32))
        mask = DataCollatorForLanguageModeling(self.tokenizer, mlm=True, seed=drawn)
        batch = mask([np.concatenate([around.before, text, around.after]).astype(int).tolist()])
        ids = batch["input_ids"][0].numpy()
        return replace(row, ids=ids, labels=batch["labels"][0].numpy())


def _masked_loss(
    outputs: "MaskedLMOutput",
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stock's, but the mean of all masked tokens of a step: BERT's own takes that of each batch."""
    from transformers.loss.loss_utils import ForMaskedLMLoss

    logits = outputs.logits
    assert logits is not None
    loss: torch.Tensor = ForMaskedLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
    return loss
