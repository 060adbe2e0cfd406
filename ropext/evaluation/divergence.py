"""Compare a model's next token with the base's, over the last tokens before each length.

It measures KL divergence, and whether both have the same first choice. The base is read first,
through its short window, and leaves the states from which it predicts those tokens. A model that is
read later computes both rows of logits, tile by tile. If its weights differ from the base's, the
base's head is kept in memory meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropext.base.errors import UnsupportedModel
from ropext.base.jsontext import digest
from ropext.base.lengths import length_at_least
from ropext.evaluation.forward import (
    TILE_COLUMNS,
    Ids,
    TokenNll,
    TokenScorer,
    Watch,
    tiled_divergence,
)
from ropext.evaluation.reading import read_pass, read_short
from ropext.results.measurement import (
    AGREEMENT,
    DIVERGENCE,
    Store,
    comparison_folder,
    loss_file_name,
)
from ropext.results.perplexity import LossStatistics

if TYPE_CHECKING:
    import torch

OPTION = "--kl"
Positions = npt.NDArray[np.int64]


def compared_positions(frame: LossStatistics, lengths: Sequence[int]) -> Positions:
    """Choose the positions of a document, in the tails before lengths, at which the forward passes
    of --kl compare a variant with the base."""
    wanted = set[int]()
    for length in lengths:
        start, stop = frame.tail_span(length)[:2]
        wanted.update(range(start, stop))
    return np.array(sorted(wanted), np.int64)


@dataclass(frozen=True)
class Against:
    """The base's states, by document, and its head."""

    store: Store  # the base's store
    head: Callable[[TokenScorer], Any]  # the base's, given the scorer of the model that is read

    def states(self, frame: LossStatistics, document: str) -> npt.NDArray[Any]:
        """Return the base's states for a document, a row for each compared token."""
        states: npt.NDArray[Any] = self.store.get(loss_file_name(states_folder(frame), document))
        return states


def states_folder(frame: LossStatistics) -> str:
    """Return the folder in the base's store for the states that its forward passes over documents
    leave for --kl."""
    return f"states-{_tails(frame)}"


def against_key(frame: LossStatistics, base: str) -> str:
    """Return a key for the forward passes that compare a model with the base (--kl), from the
    base's store and the compared tokens."""
    return digest([base, _tails(frame)])[:8]


def divergence_folders(frame: LossStatistics, base: str, regime: str) -> tuple[str, str]:
    """Return the folders of a store in which a variant's forward passes over documents leave the
    divergence and agreement (--kl) in a regime."""
    key = against_key(frame, base)
    return comparison_folder(DIVERGENCE, key, regime), comparison_folder(AGREEMENT, key, regime)


def _tails(frame: LossStatistics) -> str:
    """Return a key for the tokens of documents that the forward passes of --kl compare, from the
    lengths and the tail of a frame."""
    return digest([list(frame.lengths), frame.tail])[:8]


def served_lengths(
    frame: LossStatistics, regimes: Mapping[str, int], of_pass: int
) -> tuple[int, ...]:
    """Return the measured lengths whose numbers come from a document's forward pass of `of_pass`
    tokens."""
    passes = tuple(regimes.values())
    return tuple(length for length in frame.lengths if length_at_least(passes, length) == of_pass)


def read_base(
    scorer: TokenScorer, ids: Ids, frame: LossStatistics, bos: int | None
) -> tuple[npt.NDArray[Any], TokenNll]:
    """Read a document with the base for --kl; return its states at the compared tokens, and its
    losses through the short window.

    numpy has no bfloat16, so its bits are returned as integers.
    """
    import torch

    scorer.head_of_tiles(OPTION)
    compared = compared_positions(frame, frame.lengths)
    kept = list[torch.Tensor]()

    def watch_window(begin: int, first: int) -> Watch:
        """Return a watch for the window that begins at `begin`; it keeps the base's states for the
        compared tokens from `first` on."""

        def keep(position: int, states: "torch.Tensor") -> None:
            """Keep the base's states for the compared tokens that this window scores."""
            places = begin + position + np.arange(len(states))
            chosen = np.flatnonzero((places >= first) & np.isin(places, compared))
            kept.append(states[chosen])

        return keep

    nll = read_short(scorer, ids, frame.context, bos, watch_window)
    states = torch.cat(kept).cpu()
    if states.dtype == torch.bfloat16:
        states = states.view(torch.int16)
    return states.numpy(), nll


def read_against(
    scorer: TokenScorer,
    against: Against,
    stored: npt.NDArray[Any],
    ids: Ids,
    frame: LossStatistics,
    lengths: Sequence[int],
) -> tuple[TokenNll, TokenNll, TokenNll]:
    """Return --kl's divergence and agreement at the compared tokens of a document's pass, and all
    its losses.

    `stored` are the base's states for this document.
    """
    import torch

    head = scorer.head_of_tiles(OPTION)
    base_head = against.head(scorer)
    if len(head.weight) != len(base_head.weight):
        raise UnsupportedModel(
            f"{OPTION}: the base knows {len(base_head.weight)} tokens and this model "
            f"{len(head.weight)}; their distributions do not compare"
        )
    compared = compared_positions(frame, frame.lengths)
    wanted = compared_positions(frame, lengths)
    base_states = torch.from_numpy(stored)
    if base_states.dtype == torch.int16:
        base_states = base_states.view(torch.bfloat16)
    base_states = base_states.to(base_head.weight)
    divergence = np.full(len(ids), np.nan, np.float32)
    agreement = np.full(len(ids), np.nan, np.float32)

    def compare(position: int, states: "torch.Tensor") -> None:
        """Compare the states that predict a document's tokens from `position` on with the base's,
        for --kl."""
        places = position + np.arange(len(states))
        places = places[np.isin(places, wanted)]
        if not len(places):
            return
        differences, agreements = tiled_divergence(
            base_head,
            base_states[np.searchsorted(compared, places)].to(states.device),
            head,
            states[places - position],
            scorer.manner.columns or TILE_COLUMNS,
        )
        divergence[places] = differences.cpu().numpy()
        agreement[places] = agreements.cpu().numpy()

    nll = read_pass(scorer, ids, len(ids), compare)
    return divergence, agreement, nll
