"""Perplexity in one pass, retrieval by teacher forcing: measured against the right baselines."""

from ropext.evaluation.options import Options
from ropext.evaluation.session import Evaluation, Hooks, estimate_evaluation, evaluate

__all__ = ["Evaluation", "Hooks", "Options", "estimate_evaluation", "evaluate"]
