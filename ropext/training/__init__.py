"""One training with two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

The parts, from the bottom: `defaults`, `rows` (what a model reads) and `data` (which documents),
`judge`, `loss`, `learning` (of the next token, or of masked ones), `models` (loaded, with a LoRA),
`spectrum` (what a fit moves), `origin` (where each begins); `training`, `trainer`, `counting`,
`place`, `objective` (the order), `result`, `report`, `tuned_report` and `fit_report` (in words),
`writing`, the two objectives, `finetune` and `fit`, and `request` (the door).
"""
