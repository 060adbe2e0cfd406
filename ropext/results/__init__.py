"""What was measured, and what follows from it: values with error bars, pairing, comparison, gates.

Pure: numpy arrays and numbers in, values out. No torch, no model, no clock. A `Store` of readings
and a run's folder (`rundir`) alone touch files.
"""

# Names of models that are read: the base through its short window, it beyond that, the base trained
# on the same text, and what each stage of a run makes; the closed form that a fit has to beat, and
# the extended model before its fine-tuning.
BASE = "base"
UNTOUCHED = "untouched"
CONTROL = "control"
EXTENDED = "extended"
FITTED = "fitted"
TUNED = "tuned"
START = "start"
UNTUNED = "untuned"
STRIDED = "hf_stride"  # a perplexity read by a loop of its own, under --protocol hf-stride
SCHEMA = 1  # of results.json
SHORT = (BASE, CONTROL)  # kinds that read through the short window
