"""Rank the variants of one loaded checkpoint by the loss of the tail on documents."""

from functools import partial
from typing import TYPE_CHECKING

from ropext.base.narration import SILENT, Hooks
from ropext.evaluation.contenders import Contenders, preference
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.variants import applied
from ropext.evaluation.workload import Workload
from ropext.options.evaluate import DocumentOptions
from ropext.results import rules
from ropext.results.measurement import Store
from ropext.results.rules import Ranking

if TYPE_CHECKING:
    from torch import nn


def rank(
    model: "nn.Module",
    contenders: Contenders,
    reads: Workload,
    hooks: Hooks = SILENT,
    options: DocumentOptions | None = None,
) -> Ranking:
    """Rank methods: read the documents once with every plan, and through the base's short window;
    return the ranking.

    Nothing is written, and the model is unchanged afterwards.
    """
    computing = partial(applied, model)
    contenders = contenders.readable(computing)
    variants = contenders.variants
    reader = Reader(computing, options or DocumentOptions())
    stores = {variant.label: Store() for variant in variants}
    measured = reader.measure(variants, reads, stores, Progress(hooks=hooks))
    beside = [variant.label for variant in contenders.beside]
    return rules.rank_methods(measured, preference(contenders.plans), beside)
