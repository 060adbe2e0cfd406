"""The order of things: plan, extend, prove, fit, fine-tune, evaluate, report. The only room that
knows it.

The parts, from the bottom: extending (one checkpoint, planned, written and proved), job (a recipe,
checked), hashes (contents), steps (the stages themselves), outcome (the finished checkpoint and the
report), choosing (`--method auto`: what is tried within `--budget`, and what is taken), running
(all of it in order, and what it would take), public (what Python and the command line call).
"""
