"""What an evaluation is asked to do. A field's name is its flag, its help text is written here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ropext import scaling
from ropext.errors import UsageError
from ropext.recipe import LONGEST_TARGET
from ropext.results.coming import Coming
from ropext.results.gates import Gate, parse_gate
from ropext.results.lengths import length_text, parse_lengths
from ropext.results.protocols import PROTOCOLS
from ropext.tasks import MOST_ITEMS, TASKS, find_task
from ropext.wishes import LARGEST, LARGEST_SEED, Ranges, check_choices, check_ranges, known_values

HAYSTACKS = ("repeat", "noise", "text")
DTYPES = ("auto", "float32", "bfloat16", "float16")
TASK_NAME = re.compile(r"[\w-]+(\.(?!ya?ml\b)[\w-]+)*")  # of lm-evaluation-harness
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _field(default: Any, help_text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "metavar": metavar})


@dataclass(frozen=True)
class Options:
    """One evaluation; lists are given as comma-separated text on the command line."""

    data: str | None = _field(
        None, "documents: txt, jsonl, parquet, a folder, or a datasets id (ID or ID:CONFIG)", "DATA"
    )
    column: str | None = _field(None, "column of the text [text, or messages]", "NAME")
    split: str = _field("test", "split of a datasets id", "NAME")
    data_revision: str | None = _field(None, "branch, tag or commit of a datasets id", "REV")
    lengths: tuple[int, ...] = _field(
        (), "lengths to measure, e.g. 4k,8k,16k [doubling from a quarter of the context]", "LIST"
    )
    method: tuple[str, ...] = _field(
        (), "extend in memory by these methods, e.g. pi,ntk,yarn, without saving", "LIST"
    )
    factor: tuple[float, ...] = _field((), "factors of the methods, e.g. 2,4,8", "LIST")
    context: int | None = _field(
        None, "tokens the model was trained on, where its config misstates it", "N"
    )
    base: str | None = _field(
        None, "the model before extension, for the short window [the recorded one]", "MODEL"
    )
    adapter: str | None = _field(None, "a LoRA (peft) to evaluate on top, with and without", "DIR")
    tasks: tuple[str, ...] = _field(
        (), "retrieval tasks: " + ", ".join(task.name for task in TASKS), "LIST"
    )
    depths: tuple[float, ...] = _field(DEPTHS, "where needles lie, 0 start to 1 end", "LIST")
    items: int = _field(4, "retrieval items per task, length and depth", "N")
    haystack: str = _field("repeat", "what surrounds needles: " + ", ".join(HAYSTACKS), "NAME")
    protocol: str = _field("ropext", "how perplexity is taken: " + ", ".join(PROTOCOLS), "NAME")
    max_docs: int = _field(32, "documents to read at most", "N")
    split_documents: str | None = _field(
        None,
        "make several documents of one text: at blank-lines, at a separator, or windows (as long "
        "as the longest length, not its start alone)",
        "HOW",
    )
    pack: bool = _field(False, "glue documents up to the length; the result is labelled packed")
    dtype: str = _field("auto", "dtype of the weights: " + ", ".join(DTYPES), "NAME")
    device: str = _field("auto", "auto, cpu, cuda or cuda:N", "NAME")
    device_map: str | None = _field(None, "accelerate's placement over devices, e.g. auto", "NAME")
    attn_implementation: str | None = _field(None, "eager, sdpa, flash_attention_2 ...", "NAME")
    chunk: int | None = _field(
        None, "read in chunks of so many tokens with a KV cache [only where memory demands]", "N"
    )
    slice_memory: int = _field(256, "memory of one slice of logits, in MiB", "MIB")
    lm_eval: tuple[str, ...] = _field(
        (), "lm-evaluation-harness tasks on the same model (pip install lm-eval)", "TASKS"
    )
    seed: int = _field(0, "seed of the choice of documents, of items and of the bootstrap", "N")

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        for task in self.tasks:
            find_task(task)
        for method in self.method:
            scaling.find(method)
        if bool(self.method) != bool(self.factor):
            given, other = ("--method", "--factor 4") if self.method else ("--factor", "--method")
            raise UsageError(f"{given} alone does not say how to extend in memory; add {other}")
        check_ranges(self, _RANGES)
        if self.lengths and self.lengths[-1] > LONGEST_TARGET:
            raise UsageError(
                f"--lengths go up to {LONGEST_TARGET} tokens, was {str(self.lengths[-1])[:40]}"
            )
        if self.base is not None and self.method:
            raise UsageError(
                "--base goes with a checkpoint that is extended already; with --method the model "
                "itself is the base"
            )
        if not self.data and not self.tasks and not self.lm_eval:
            raise UsageError("nothing to measure: give --data for perplexity, --tasks, or both")
        if self.haystack == "text" and not self.data:
            raise UsageError("--haystack text is made of --data; give it, or another haystack")
        for task in self.lm_eval:
            # A path would be a file of tasks, which may name functions that are then run.
            if isinstance(task, str) and not TASK_NAME.fullmatch(task):
                raise UsageError(
                    f"--lm-eval takes names of installed tasks, not files: {task!r} is none"
                )
        for bad in [d for d in self.depths if not 0 <= d <= 1]:
            raise UsageError(f"--depths lie between 0 and 1, was {bad:g}")


_CHOICES = {"protocol": tuple(PROTOCOLS), "haystack": HAYSTACKS, "dtype": DTYPES}
_RANGES: Ranges = {
    "items": (1, MOST_ITEMS),
    "max_docs": (1, LARGEST),
    "chunk": (16, LARGEST),
    "slice_memory": (1, LARGEST),
    "seed": (0, LARGEST_SEED),
}


def build(values: Mapping[str, Any]) -> Options:
    """Options from text or typed values; an unknown key is refused with those that are known."""
    given = known_values(Options, values)
    for key in ("method", "tasks", "lm_eval"):
        given |= {key: _words(given[key])} if key in given else {}
    for key in ("factor", "depths"):
        given |= {key: _numbers(given[key], f"--{key}")} if key in given else {}
    if "lengths" in given:
        given["lengths"] = _lengths(given["lengths"])
    return Options(**given)


def _words(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in parts if str(part).strip())


def _numbers(value: Any, flag: str) -> tuple[float, ...]:
    if isinstance(value, int | float):
        return (float(value),)
    try:
        return tuple(float(part) for part in _words(value))
    except ValueError:
        raise UsageError(f"{flag} {value!r} is not a list of numbers; write e.g. 2,4,8") from None


def _lengths(value: Any) -> tuple[int, ...]:
    text = value if isinstance(value, str) else ",".join(str(part) for part in value)
    return parse_lengths(text)


def gates_of(texts: tuple[str, ...]) -> tuple[Gate, ...]:
    """`--fail-if`, once or several times."""
    return tuple(parse_gate(text) for text in texts)


def coming(options: Options, labels: Sequence[str], lengths: Sequence[int]) -> Coming:
    """What gates may ask of an evaluation with these options."""
    return Coming(
        tuple(labels),
        tuple(lengths),
        has_text=options.data is not None,
        tasks=options.tasks,
        is_strided=options.protocol == "hf-stride",
    )


def describe_lengths(lengths: tuple[int, ...]) -> str:
    """`1k, 2k, 4k`."""
    return ", ".join(length_text(length) for length in lengths)
