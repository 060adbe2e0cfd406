"""One training with two objectives, on transformers.Trainer: a LoRA of an extended checkpoint, or
the spectrum itself with the weights frozen (a fit).

Read `request` first (what is asked for), then `finetune` or `fit` (how it is prepared), then
`objective` (the order that both share: measure, learn, choose, write).

What these use: `origin` (the checkpoint that a fine-tuning begins from), `starts` (the closed forms
that a fit begins from) and `spectrum` (what it moves); `defaults` (settings), `data` (which
documents train and judge), `rows` (what a model reads), `loss` and `learning`; `models` (loaded,
with a LoRA), `new_rows` (of a position table), `training` (all of that together), `trainer` and
`judge`. A finished training is a record in `result`; `report`, `tables`, `tuned_report` and
`fit_report` say it in words, `tuned_writing`, `fit_choice` and `fit_writing` write it.
"""
