"""One training with two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

The parts, from the bottom: `defaults`, `rows` (what a model reads) and `data` (which documents),
`judge`, `loss`, `learning` (of the next token, or of masked ones), `trainable` (a LoRA, new rows of
a table, or both), `models` (loaded, with a LoRA), `positions` and `origin` (where a fine-tuning
begins), `starts` (where a fit begins) and `spectrum` (what it moves); `training`, `trainer`,
`counting`, `place`, `objective` (the order), `result`, `report`, `tuned_report`, `fit_report` (in
words), `tuned_writing` with `adapter_writing`, `fit_choice` and `fit_writing`; the two objectives,
`adapter_objective` and `spectrum_objective`; what comes before them, `finetune` and `fit`; and
`request` (the door).
"""
