"""The order of things: plan, extend, prove, fit, fine-tune, evaluate, report. The only room that
knows it.

The parts, from the bottom: extending (one checkpoint, planned, written and proved), job (a recipe,
checked), hashes (contents), work (a run and its places), steps (the stages themselves), evidence
(what was measured), report_page, ran (what a run did), outcome (the finished checkpoint), dividing,
prospect, trying and choosing (`--method auto`: its documents, what would be tried, what was read,
what is taken), running (all of it in order, and what it would take), fitting, ports and public
(what Python and the command line call).
"""
