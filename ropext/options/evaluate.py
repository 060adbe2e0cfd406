"""Options of an evaluation: its documents, its measurements, and the models that are measured."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, WrapValidator, model_validator

from ropext import scaling
from ropext.base.errors import UsageError
from ropext.base.jsontext import Json
from ropext.options.cache import CACHE_NAMES, RoundedCaches, StoredCache, stored_cache
from ropext.options.fields import (
    ATTENTIONS,
    LARGEST,
    LARGEST_DOCUMENT,
    LONGEST_TARGET,
    Attention,
    Content,
    Count,
    Device,
    Documents,
    Dtype,
    LargestDocument,
    Length,
    Lengths,
    LocalPath,
    MethodNames,
    ModelPlace,
    Neutral,
    Numbers,
    Options,
    Panel,
    Role,
    Seed,
    Served,
    Stored,
    Whole,
    Words,
    list_schema,
    wanted,
)
from ropext.scaling import self_extend
from ropext.scaling.self_extend import FoldOptions
from ropext.tasks import MOST_ITEMS, RULER, TASKS, OwnTask, is_in_words, named_tasks

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FAMILIES = [task.name for task in TASKS if not task.ruler]
IN_TOKEN_IDS = [task.name for task in TASKS if not task.in_words]


def _task_names(value: object, check: Callable[[object], object]) -> tuple[str, ...]:
    """Read the option --tasks: names of tasks, files of questions, and from Python functions."""
    words = value
    if isinstance(value, str) and not isinstance(value, OwnTask):
        words = value.split(",")
    elif callable(value) or isinstance(value, OwnTask | Path):
        words = [value]
    if not isinstance(words, list | tuple):
        check(value)
        return ()
    given = list[object]()
    for word in words:
        if isinstance(word, str) and not isinstance(word, OwnTask):
            word = word.strip()
        if word != "":
            given.append(word)
    check(tuple(word for word in given if not callable(word) and not isinstance(word, Path)))
    return named_tasks(given)


TaskNames = Annotated[
    tuple[str, ...], WrapValidator(_task_names), list_schema("string"), Role.TASKS
]
TASK_NAME = re.compile(r"[\w-]+(\.(?!ya?ml\b)[\w-]+)*")  # of lm-evaluation-harness


class DocumentOptions(Options):
    """Options that say which documents are read, and how the model that reads them is loaded."""

    column: Served[Stored[str | None]] = wanted(
        None,
        "column of the text [text, or messages]",
        "NAME",
        panel=Panel.DATA,
    )
    split: Served[Stored[str | None]] = wanted(
        None,
        "split of a dataset, by id or in a folder [test]",
        "NAME",
        panel=Panel.DATA,
    )
    data_revision: Served[Stored[str | None]] = wanted(
        None,
        "branch, tag or commit of a datasets id",
        "REV",
        panel=Panel.DATA,
    )
    split_documents: Stored[str | None] = wanted(
        None,
        "split each text into documents: at blank-lines, at a separator, or into windows of the "
        "longest length [read only the start of each text]",
        "HOW",
        panel=Panel.DATA,
    )
    max_docs: Served[Count] = wanted(
        32,
        "documents to read at most",
        panel=Panel.DATA,
    )
    max_document_mib: Served[Neutral[LargestDocument]] = LARGEST_DOCUMENT
    dtype: Dtype = wanted(
        "auto",
        "type of the weights",
        panel=Panel.LOADING,
    )
    device: Neutral[Device] = wanted(
        "auto",
        "auto (cuda or cpu), cpu, cuda, cuda:N, mps",
        "NAME",
        panel=Panel.LOADING,
    )
    device_map: Neutral[str | None] = wanted(
        None,
        "accelerate's placement over devices, e.g. auto",
        "NAME",
        panel=Panel.LOADING,
    )
    attn_implementation: Attention | None = wanted(
        None,
        ATTENTIONS,
        "NAME",
        panel=Panel.LOADING,
    )
    chunk: Neutral[Annotated[Whole, Field(ge=16, le=LARGEST)] | None] = wanted(
        None,
        "read in chunks of this many tokens, with a KV cache [only if memory demands it]",
        panel=Panel.LOADING,
    )
    slice_memory: Neutral[Count] = wanted(
        256,
        "memory of one slice of logits, in MiB",
        "MIB",
        panel=Panel.LOADING,
    )
    seed: Served[Seed] = wanted(
        0,
        "seed of the choice of documents, of items and of the bootstrap",
        panel=Panel.DATA,
    )


class Measuring(DocumentOptions):
    """Options of the measurements of `ropext eval` and of a run. A new option of eval belongs here
    if a run can have it too."""

    key_schema = 2

    data: Served[Content[Documents | None]] = wanted(
        None,
        "documents: txt, jsonl, parquet, a folder, or a datasets id (ID or ID:CONFIG)",
        "DATA",
        panel=Panel.DATA,
        basic=True,
    )
    lengths: Served[Lengths] = wanted(
        (),
        "lengths to measure, e.g. 4k,8k,16k [doubling from a quarter of the context]",
        "LIST",
        panel=Panel.DATA,
        basic=True,
    )
    tasks: Served[TaskNames] = wanted(
        (),
        f"retrieval tasks: {', '.join(FAMILIES)}; {RULER} = the thirteen of RULER; FILE.jsonl = "
        "your own questions",
        "LIST",
        panel=Panel.DATA,
        basic=True,
    )
    depths: Served[Numbers] = wanted(
        DEPTHS,
        "places of the needles: 0 is the start, 1 the end",
        "LIST",
        panel=Panel.DATA,
    )
    items: Served[Annotated[Whole, Field(ge=1, le=MOST_ITEMS)]] = wanted(
        4,
        "retrieval items per task, length and depth",
        panel=Panel.DATA,
    )
    haystack: Served[Literal["repeat", "noise", "text"]] = wanted(
        "repeat",
        f"what surrounds the needles of {', '.join(IN_TOKEN_IDS)}",
        panel=Panel.DATA,
    )
    passages: Content[LocalPath | None] = wanted(
        None,
        "questions and passages of qa_1, qa_2 and passages, JSONL [made-up ones]",
        "FILE",
        panel=Panel.DATA,
    )
    chat: bool = wanted(
        False,
        "ask tasks in words through the model's chat template",
        panel=Panel.DATA,
    )
    chat_args: Served[Words] = wanted(
        (),
        "arguments of the chat template, e.g. enable_thinking=false",
        "NAME=VALUE,...",
        panel=Panel.DATA,
    )
    protocol: Literal["ropext", "yarn", "hf-stride"] = wanted(
        "ropext",
        "perplexity protocol",
        panel=Panel.DATA,
    )
    kl: bool = wanted(
        False,
        "also report KL divergence from the base's next-token distribution, and the share of "
        "tokens with the same first choice",
        panel=Panel.DATA,
    )
    lm_eval: Words = wanted(
        (),
        "lm-evaluation-harness tasks on the same model (pip install lm-eval)",
        "TASKS",
        panel=Panel.DATA,
    )
    lm_eval_limit: Count | None = wanted(
        None,
        "questions read of each --lm-eval task, its first ones [all]",
        panel=Panel.DATA,
    )

    @property
    def template_args(self) -> dict[str, Json]:
        """Return the variables that the option --chat-args gives the chat template: each value is
        read as JSON, or else as text."""
        variables = dict[str, Json]()
        for word in self.chat_args:
            name, _, value = word.partition("=")
            if not name.isidentifier() or not value:
                raise UsageError(
                    f"--chat-args is NAME=VALUE, such as enable_thinking=false; was {word[:60]!r}"
                )
            variables[name] = value
            with suppress(ValueError):
                variables[name] = json.loads(value)
        return variables


class SelfExtend(Options):
    """Options of Self-Extend, which folds positions in memory."""

    window: Content[Count | None] = wanted(
        None,
        "self-extend: distances below this stay as they are [half of the context]",
        panel=Panel.KNOBS,
    )
    group: Content[Annotated[Whole, Field(ge=0, le=LARGEST)] | None] = wanted(
        None,
        "self-extend: distant tokens per shared position; 0: all share one [by the target]",
        panel=Panel.KNOBS,
    )
    literal: Content[bool] = wanted(
        False,
        "self-extend: the paper's rule, by which queries inside the context see groups too",
        panel=Panel.KNOBS,
    )

    @property
    def fold(self) -> FoldOptions:
        """Return the options --window, --group and --literal as the plan of Self-Extend takes
        them."""
        return FoldOptions(self.window, self.group, self.literal)


class Evaluate(SelfExtend, Measuring):
    """One call of `ropext eval`. It also says which models are measured; in a run, the recipe's
    other sections decide this."""

    method: MethodNames = wanted(
        (),
        "extend in memory by these methods, e.g. pi,yarn,module:function, without saving",
        "LIST",
        panel=Panel.METHOD,
        basic=True,
    )
    factor: Numbers = wanted(
        (),
        "factors of the methods, e.g. 2,4,8",
        "LIST",
        panel=Panel.HOW_FAR,
        basic=True,
    )
    target: Length | None = wanted(
        None,
        "tokens that the methods extend to (or give --factor)",
        panel=Panel.HOW_FAR,
        basic=True,
    )
    context: Served[Length | None] = wanted(
        None,
        "tokens the model was trained on, if its config misstates them",
        panel=Panel.HOW_FAR,
    )
    base: Content[ModelPlace | None] = wanted(
        None,
        "the model before extension, evaluated on truncated text [the recorded one]",
        "MODEL",
        panel=Panel.COMPARED,
        basic=True,
    )
    adapter: Content[LocalPath | None] = wanted(
        None,
        "a LoRA (peft) to evaluate on top, with and without",
        "DIR",
        panel=Panel.COMPARED,
        basic=True,
    )
    kv: RoundedCaches = wanted(
        (),
        f"read each long row also with its KV cache rounded to {', '.join(CACHE_NAMES[1:])}, or to "
        "two of them as KEYS/VALUES",
        "LIST",
        panel=Panel.COMPARED,
    )

    @property
    def stored_caches(self) -> tuple[StoredCache, ...]:
        """Return the caches of the option --kv, with which long rows are read a second time."""
        return tuple(stored_cache(name) for name in self.kv)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        """Refuse --chat without tasks or with one in token ids, and --chat-args without --chat."""
        if self.template_args and not self.chat:
            raise UsageError("--chat-args are for the chat template that --chat asks tasks through")
        if not self.chat:
            return self
        for_words = "--chat is for tasks that are asked in words, and"
        for name in self.tasks:
            if not is_in_words(name):
                raise UsageError(f"{for_words} {name} is none")
        if not self.tasks and not self.lm_eval:
            raise UsageError(f"{for_words} none is given (--tasks)")
        return self

    @model_validator(mode="after")
    def _check_measurements(self) -> Self:
        """Refuse options of `eval` that measure nothing, --lengths or --depths out of range, a
        depth named twice, and files in --lm-eval."""
        if self.lengths and self.lengths[-1] > LONGEST_TARGET:
            raise UsageError(
                f"--lengths go up to {LONGEST_TARGET} tokens, was {str(self.lengths[-1])[:40]}"
            )
        if not self.data and not self.tasks and not self.lm_eval:
            raise UsageError("nothing to measure: give --data for perplexity, --tasks, or both")
        if self.kl and not self.data:
            raise UsageError("--kl is measured on documents: give --data")
        if self.haystack == "text" and not self.data:
            raise UsageError("--haystack text is made of --data; give it, or another haystack")
        for task in self.lm_eval:
            # A path would be a file of tasks, which may name functions that are then run.
            if not TASK_NAME.fullmatch(task):
                raise UsageError(
                    f"--lm-eval takes names of installed tasks, not files: {task!r} is none"
                )
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UsageError(f"--depths takes numbers between 0 and 1, not {depth:g}")
        for depth in self.depths:
            if self.depths.count(depth) > 1:
                raise UsageError(
                    f"--depths names {depth:g} twice; name each depth once and give --items N for "
                    "more questions at it"
                )
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        """Refuse an unknown --method, and options of `eval` that do not say how far it extends,
        belong to another method, or contradict each other."""
        for method in self.method:
            scaling.check_known(method)
        if self.factor and self.target:
            raise UsageError(f"--factor and --target {self.target} both say how far; give one")
        alone = "alone does not say how to extend in memory; add"
        if self.method and not self.factor and not self.target:
            raise UsageError(f"--method {alone} --factor 4, or --target N")
        if self.factor and not self.method:
            raise UsageError(f"--factor {alone} --method")
        if self.target and not self.method:
            raise UsageError(f"--target {alone} --method")
        if self.fold != FoldOptions() and self_extend.NAME not in self.method:
            raise UsageError("--window, --group and --literal are of --method self-extend")
        if self.base is not None and self.method:
            raise UsageError(
                "--base goes with a checkpoint that is extended already; with --method the model "
                "itself is the base"
            )
        return self
