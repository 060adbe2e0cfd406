"""Compute what measured losses and answers amount to: perplexity, metrics, error bars, comparisons,
gates; keep them in a folder.

The functions are pure: numpy arrays and numbers in, values out, without torch, models or clocks.
Only a `Store` of readings and a run's folder (`rundir`) touch files.
"""

# Names of models: the base through its short window, the base beyond it, the base trained on the
# same text, and the result of each stage of a run; then the closed form that a fit has to beat, and
# the extended model before its fine-tuning.
BASE = "base"
UNTOUCHED = "untouched"
CONTROL = "control"
EXTENDED = "extended"
FITTED = "fitted"
TUNED = "tuned"
START = "start"
UNTUNED = "untuned"
# Numbers of results.json beside the metrics of text and of each task.
STRIDED = "hf_stride"  # a perplexity read by a loop of its own, under --protocol hf-stride
RULER_CONTEXT = "ruler_context"  # the longest length that all of RULER's tasks reach
FOUND = "found"  # of a server: the share of all answers; also the outcome of one answer
SCHEMA = 1  # of results.json
SHORT = (BASE, CONTROL)  # kinds that read through the short window
