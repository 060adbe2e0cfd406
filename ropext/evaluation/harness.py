"""Run lm-evaluation-harness on the model in memory, to find short-context regressions."""

import importlib.util
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base.errors import InputError, RopextError, UsageError
from ropext.base.jsontext import Json, JsonObject, digest
from ropext.files.checkpoint.provenance import installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ropext.evaluation.variants import Computing, Variant
    from ropext.options.evaluate import Evaluate
    from ropext.results.measurement import Store


def check(tasks: Sequence[str]) -> None:
    """Raise UsageError if lm-evaluation-harness is not installed or does not know a task of
    --lm-eval, before anything is read."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError(
            "--lm-eval needs lm-evaluation-harness, which is not installed: "
            "pip install 'lm-eval>=0.4.9'"
        )
    from lm_eval.tasks import TaskManager

    known = set(TaskManager().all_tasks)
    for task in tasks:
        if task not in known:
            raise UsageError(
                f"--lm-eval {task}: the installed lm-evaluation-harness has no such task; "
                "`lm-eval ls tasks` lists them"
            )


def decided_by(tasks: Sequence[Json]) -> dict[str, Json]:
    """Return the further facts that decide the numbers of lm-evaluation-harness (--lm-eval).

    They are its version, the version of the library that loads the questions, and the files of the
    tasks, which users edit in place.
    """
    from lm_eval.tasks import TaskManager

    named = [task for task in tasks if isinstance(task, str)]
    index: JsonObject = TaskManager().task_index if named else {}
    folders: set[Path] = set()
    for task in named:
        folders |= _task_folders(task, index)
    files = {folder.name: _folder_digest(folder) for folder in sorted(folders)}
    return {"versions": installed(("lm-eval", "datasets")), "tasks": files}


def _task_folders(task: str, index: JsonObject) -> set[Path]:
    """Return the folder of a task of lm-evaluation-harness that a measurement runs (--lm-eval), or
    of each task with a tag."""
    if (path := _task_field(index.get(task), "yaml_path")) is not None:
        return {path.parent}
    tagged = [name for name, entry in index.items() if task in (_task_field(entry, "tags") or ())]
    listed = _task_field(index.get(task), "task") or tagged
    paths = [_task_field(index.get(name), "yaml_path") for name in listed if isinstance(name, str)]
    return {path.parent for path in paths if path is not None}


def _task_field(entry: Json, name: str) -> Json:
    """Return a field of a task in lm-evaluation-harness's list: an entry is a dict up to 0.4.9, an
    object later."""
    value = entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name, None)
    if name != "yaml_path":
        return value
    return Path(value) if isinstance(value, str | Path) else None  # a tag has -1


def _folder_digest(folder: Path) -> str:
    """Return the digest of the files next to a task of lm-evaluation-harness, which it includes and
    imports."""
    texts = {}
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix in ("", ".yaml", ".yml", ".py"):
            texts[file.name] = file.read_text("utf-8")
    return digest(texts)


def run_tasks(
    computing: "Computing",
    tokenizer: "PreTrainedTokenizerBase",
    options: "Evaluate",
    length: int,
    variants: Sequence["Variant"],
    stores: "Mapping[str, Store]",
) -> dict[str, Json]:
    """Return lm-evaluation-harness's own metrics per variant and task; results in a store are not
    computed again.

    ropext passes on the context length, because the harness truncates longer prompts from the left
    with only a warning. The harness computes log-softmax in float32, not in the dtype of the
    weights.
    """
    results: dict[str, Json] = {}
    decided = decided_by(options.lm_eval)
    for variant in variants:
        if variant.reads_short:
            continue
        asked = [options.lm_eval, options.seed, length, options.chat, options.template_args]
        name = digest([*asked, options.lm_eval_limit, decided])[:16]
        store = stores[variant.label]
        file = f"lm-eval/{name}.json"
        if not store.has(file):
            with computing(variant) as model:
                store.put(file, _run_harness(model, tokenizer, options, length))
        results[variant.label] = store.get(file)
    return results


def _run_harness(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", options: "Evaluate", length: int
) -> Json:
    """Run lm-evaluation-harness on one model in memory, and return its metrics."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # The harness runs code that comes with a dataset when this is set; it stays off.
    os.environ.pop("HF_DATASETS_TRUST_REMOTE_CODE", None)
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        max_length=length,
        batch_size=1,
        softmax_dtype="float32",
        chat_template_args=options.template_args,
    )
    try:
        with redirect_stdout(sys.stderr):  # the harness prints while it works
            results = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=list(options.lm_eval),
                # Tasks that build prompts of a given length (RULER's) read these.
                task_manager=TaskManager(
                    metadata={"max_seq_lengths": [length], "tokenizer": tokenizer.name_or_path}
                ),
                apply_chat_template=options.chat,
                limit=options.lm_eval_limit,
                random_seed=options.seed,
                numpy_random_seed=options.seed,
                torch_random_seed=options.seed,
            )
    except RopextError:
        raise
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise InputError(
            f"--lm-eval {','.join(map(str, options.lm_eval))}: the harness stopped: {first}; what "
            "was read before is kept (with -o RUN)"
        ) from error
    return _plain_json((results or {}).get("results", {}))


def _plain_json(data: Json) -> Json:
    """Return the metrics of lm-evaluation-harness in JSON's own types; a number that is not finite
    becomes null."""
    if isinstance(data, Mapping):
        return {str(key): _plain_json(value) for key, value in data.items()}
    if data is None or isinstance(data, str | bool | int):
        return data
    number = float(data) if hasattr(data, "__float__") else math.nan
    return number if math.isfinite(number) else None
