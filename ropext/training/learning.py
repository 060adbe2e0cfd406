"""Define how a model learns: each token from the tokens before it, or masked tokens from all
others.

The training loop depends on the model's kind only through this class. Loading, writing and
refusals look at the kind themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ropext.evaluation.workload import NEXT_TOKEN, MaskedTokens, Prediction
from ropext.results.perplexity import MASK_STRIDE
from ropext.training.loss import use_sliced_loss
from ropext.training.rows import MASKED, TrainingRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.modeling_outputs import MaskedLMOutput

Loss = Callable[..., torch.Tensor]  # as transformers' Trainer calls it


@dataclass(frozen=True)
class Learning:
    """How a model learns from its rows. Each token is predicted from the tokens before it, unless
    `prediction` masks tokens."""

    prediction: Prediction = NEXT_TOKEN
    scored: str = "tokens"  # the tokens that held-out losses are over
    notes: tuple[str, ...] = ()
    loss: Loss | None = None  # None = the model's own
    why_whole: str = ""  # why its loss needs whole logits; "" = the model itself decides

    def rows(
        self, rows: Sequence[TrainingRow], tokenizer: "PreTrainedTokenizerBase", seed: int
    ) -> Sequence[TrainingRow]:
        """Return the rows that the model reads, made of rows of text: with some tokens masked, or
        as they are."""
        if isinstance(self.prediction, MaskedTokens):
            return MaskedRows(rows, tokenizer, self.prediction, seed)
        return rows

    def use_sliced_loss(self, model: "PreTrainedModel") -> str | None:
        """Give a model the loss that needs no whole logits; return the reason if it keeps its own
        and the user must know. Few tokens of a masked model are scored, so that it keeps its own.
        """
        return None if self.why_whole else use_sliced_loss(model)


NEXT_TOKEN_LEARNING = Learning()


def masked_learning(prediction: MaskedTokens) -> Learning:
    """Return how a masked language model learns: by a loss on the tokens that transformers'
    collator masks."""
    note = (
        "losses on held-out documents are pseudo-perplexities: each pass masks every "
        f"{MASK_STRIDE}th of the last tokens"
    )
    why_whole = "a masked language model takes its own"
    return Learning(prediction, "masked tokens", (note,), _masked_loss, why_whole)


@dataclass(frozen=True)
class MaskedRows(Sequence[TrainingRow]):
    """Rows of a masked language model. Special tokens surround each row, in the place of its last
    tokens. The stock collator masks by the seed and the row's number alone."""

    rows: Sequence[TrainingRow]
    tokenizer: "PreTrainedTokenizerBase"
    prediction: MaskedTokens
    seed: int

    def __len__(self) -> int:
        """Return the number of training rows."""
        return len(self.rows)

    def __getitem__(self, number: int) -> TrainingRow:  # type: ignore[override]
        """Return the training row of this number between special tokens, with tokens masked by
        the seed and the number alone."""
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
    """Return the stock loss of masked tokens in training, as the mean over a whole step; BERT's
    own loss takes the mean of each batch."""
    from transformers.loss.loss_utils import ForMaskedLMLoss

    logits = outputs.logits
    assert logits is not None
    loss: torch.Tensor = ForMaskedLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
    return loss
