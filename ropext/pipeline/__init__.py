"""Read recipes, run the stages in their order, and return each command's result to Python.

The modules, from the lowest up:

  extending         plan, write and verify one checkpoint
  gguf_outputs      a GGUF as a directory, and the GGUF that a fit adds to its output
  saving            a model in memory as a checkpoint
  recipe            a recipe's text, keys and sections
  checked_recipe    a recipe that may run: its paths, data and gates
  run_digests       digests of the inputs and outputs of a run
  run_context       a run, its plan and its paths
  stage             a step that a run does once, and what all stages share
  stages            the stages before the report
  evidence          the measurements of a run
  python_results    the results of calls from Python, and of a run
  opening           the result of an earlier call, read from its output
  report_page       the report of a run
  run_output        the last stage: the finished checkpoint and the report
  auto_plan         the methods and documents of `--method auto`
  auto_choice       the measurement of these methods, and the choice among them
  auto              the choice as a step of a run
  running           a whole run, and the estimate of its work
  server_evaluation the evaluation of a running server
  public            the functions that Python calls
"""
