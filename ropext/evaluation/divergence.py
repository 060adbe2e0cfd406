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
from ropext.results.perplexity import EvaluationSettings

if TYPE_CHECKING:
    import torch

OPTION = "--kl"
Positions = npt.NDArray[np.int64]


def compared_positions(frame: EvaluationSettings, lengths: Sequence[int]) -> Positions:
    """Return the positions of the tokens at which a model is compared with the base, in the tails
    before lengths."""
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

    def states(self, frame: EvaluationSettings, document: str) -> npt.NDArray[Any]:
        """Return the base's states for a document, a row for each compared token."""
        states: npt.NDArray[Any] = self.store.get(loss_file_name(states_folder(frame), document))
        return states


def states_folder(frame: EvaluationSettings) -> str:
    """Return the folder of the base's states in its store."""
    return f"states-{_tails(frame)}"


def against_key(frame: EvaluationSettings, base: str) -> str:
    """Return a key for the comparison with the base, from its store and the compared tokens."""
    return digest([base, _tails(frame)])[:8]


def divergence_folders(frame: EvaluationSettings, base: str, regime: str) -> tuple[str, str]:
    """Return the folders of a model's divergence and agreement in a regime."""
    key = against_key(frame, base)
    return comparison_folder(DIVERGENCE, key, regime), comparison_folder(AGREEMENT, key, regime)


def _tails(frame: EvaluationSettings) -> str:
    """Return a key for the compared tokens of a frame."""
    return digest([list(frame.lengths), frame.tail])[:8]


def served_lengths(
    frame: EvaluationSettings, regimes: Mapping[str, int], of_pass: int
) -> tuple[int, ...]:
    """Return the measured lengths whose numbers come from a pass of `of_pass` tokens."""
    passes = tuple(regimes.values())
    return tuple(length for length in frame.lengths if length_at_least(passes, length) == of_pass)


def read_base(
    scorer: TokenScorer, ids: Ids, frame: EvaluationSettings, bos: int | None
) -> tuple[npt.NDArray[Any], TokenNll]:
    """Return the base's states at the compared tokens, and its losses through the short window."""
    scorer.head_of_tiles(OPTION)
    keeper = StateKeeper(compared_positions(frame, frame.lengths), frame.longest)
    nll = read_short(scorer, ids, frame.context, bos, keeper.window)
    return keeper.states, nll


def read_against(
    scorer: TokenScorer,
    against: Against,
    states: npt.NDArray[Any],
    ids: Ids,
    frame: EvaluationSettings,
    lengths: Sequence[int],
) -> tuple[TokenNll, TokenNll, TokenNll]:
    """Return divergence and agreement at the compared tokens of a pass, and all its losses.

    `states` are the base's for this document.
    """
    watch = DivergenceWatch(frame, lengths, scorer, against)
    watch.document(states, len(ids))
    nll = read_pass(scorer, ids, len(ids), watch)
    return watch.divergence, watch.agreement, nll


class StateKeeper:
    """Keeps the states from which the base predicts some tokens of a document."""

    def __init__(self, positions: Positions, longest: int) -> None:
        self.rows = np.full(longest + 1, -1, np.int64)
        self.rows[positions] = np.arange(len(positions))
        self.count = len(positions)
        self.kept: torch.Tensor | None = None

    def window(self, begin: int, first: int) -> Watch:
        """Return a watch for a window that begins at a position; it scores the tokens from `first`
        on."""

        def keep(position: int, states: "torch.Tensor") -> None:
            places = begin + position + np.arange(len(states))
            chosen = np.flatnonzero((places >= first) & (self.rows[places] >= 0))
            if self.kept is None:
                self.kept = states.new_zeros(self.count, states.shape[-1])
            if len(chosen):
                self.kept[self.rows[places[chosen]]] = states[chosen]

        return keep

    @property
    def states(self) -> npt.NDArray[Any]:
        """Return the states that were kept.

        numpy has no bfloat16, so its bits are returned as integers.
        """
        import torch

        assert self.kept is not None, "no window was watched"
        kept = self.kept.cpu()
        if kept.dtype == torch.bfloat16:
            kept = kept.view(torch.int16)
        return kept.numpy()


class DivergenceWatch:
    """Compares each compared token of one pass with the base."""

    def __init__(
        self,
        frame: EvaluationSettings,
        lengths: Sequence[int],
        scorer: TokenScorer,
        against: Against,
    ) -> None:
        self.scorer = scorer
        self.head = scorer.head_of_tiles(OPTION)
        self.base_head = against.head(scorer)
        if len(self.head.weight) != len(self.base_head.weight):
            raise UnsupportedModel(
                f"{OPTION}: the base knows {len(self.base_head.weight)} tokens and this model "
                f"{len(self.head.weight)}; their distributions do not compare"
            )
        every = compared_positions(frame, frame.lengths)
        self.rows = np.full(frame.longest + 1, -1, np.int64)
        self.rows[every] = np.arange(len(every))
        wanted = compared_positions(frame, lengths)
        self.is_wanted = np.zeros(frame.longest + 1, bool)
        self.is_wanted[wanted] = True

    def document(self, stored: npt.NDArray[Any], count: int) -> None:
        """Begin a document of `count` tokens; `stored` are the base's states for it."""
        import torch

        states = torch.from_numpy(stored)
        if states.dtype == torch.int16:
            states = states.view(torch.bfloat16)
        self.states = states.to(self.base_head.weight)
        self.divergence = np.full(count, np.nan, np.float32)
        self.agreement = np.full(count, np.nan, np.float32)

    def __call__(self, position: int, states: "torch.Tensor") -> None:
        places = position + np.arange(len(states))
        places = places[self.is_wanted[places]]
        if not len(places):
            return
        divergence, agreement = tiled_divergence(
            self.base_head,
            self.states[self.rows[places]].to(states.device),
            self.head,
            states[places - position],
            self.scorer.manner.columns or TILE_COLUMNS,
        )
        self.divergence[places] = divergence.cpu().numpy()
        self.agreement[places] = agreement.cpu().numpy()
