"""Read recipes, run the stages in their order, and return each command's result to Python.

The modules, from the lowest up:

  extending       plan, write and verify one checkpoint
  job             a checked recipe
  hashes          digests of contents
  work            a run and its paths
  step            a piece of work that a run does once
  stage           what all stages share
  training_stages, steps   the stages
  evidence        the measurements of a run
  report_page     the report of a run
  ran             the result of a run
  outcome         the finished checkpoint
  dividing        the documents of `--method auto`
  planned_choice  the methods that `--method auto` would measure
  trying          the measurement of these methods
  choosing        the choice among them
  running         a whole run, and the estimate of its work
  fitting, ports, public   the entry points for Python and the command line
"""
