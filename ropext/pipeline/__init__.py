"""Read recipes, run the stages in their order, and return each command's result to Python.

The modules, from the lowest up:

- One output: `extending`, `gguf_outputs` and `saving` plan, write and verify it.
- A recipe: `recipe` reads it. `checked_recipe` checks its paths, data and gates.
- A run: `run_context` has its plan and paths, `run_digests` the digests of its files.
- Its stages: `stage` has the parts that all stages share, `stages` the stages themselves.
- Its end: `evidence` collects the measurements, `report_page` and `run_output` write the rest.
- `--method auto`: `auto_plan` names the candidates, `auto_choice` decides, `auto` is the stage.
- The whole: `running` does a run, or estimates its work. `demo` and `server_evaluation` do theirs.
- Python: `public` has the functions, `python_results` their results. `opening` reads old ones.
"""
