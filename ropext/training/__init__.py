"""Train with one of two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

Read `request` first (the wanted training), then `finetune` or `fit` (its preparation), then
`objective` (the order that both share: measure, learn, choose, write).

A fine-tuning begins from an `origin`. A fit begins from one of the `starts` and moves a `spectrum`.
`defaults` has the settings, `data` divides the documents and holds all of a training's facts, and
`rows` are the model's input. `models` loads the model, `trainer` trains it, and `judge` evaluates.

A finished training is a record in `result`. `report`, `tables`, `tuned_report` and `fit_report`
describe it. `tuned_writing`, `fit_choice` and `fit_writing` write it.
"""
