"""Options of an evaluation that asks a running server."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ropext.base.errors import UsageError
from ropext.options.evaluate import Evaluate, Measuring
from ropext.options.fields import (
    LONGEST_TARGET,
    Content,
    Count,
    Length,
    ModelPlace,
    Neutral,
    Panel,
    Served,
    Trait,
    Whole,
    flag,
    wanted,
)
from ropext.tasks import MOST_ITEMS, OwnTask, wording_of

MOST_DEPTHS = 64  # needles in one text


class EndpointOptions(Measuring):
    """The options of one evaluation of a running server."""

    endpoint: Content[str | None] = wanted(
        None,
        "ask a running server (LM Studio, Ollama, llama-server, vLLM, SGLang)",
        "URL",
        panel=Panel.PORT,
        basic=True,
    )
    against: Content[ModelPlace | None] = wanted(
        None,
        "plan, directory or GGUF to take the trained context from; prompts truncated to it are the "
        "baseline",
        "MODEL",
        panel=Panel.PORT,
        basic=True,
    )
    plain: Content[str | None] = wanted(
        None,
        "server of the unscaled model, for the truncated prompts [the same server]",
        "URL",
        panel=Panel.PORT,
        basic=True,
    )
    quick: Neutral[bool] = wanted(
        False,
        "a first look: --items 1, and three --lengths from the trained context to the server's "
        "limit, if you give no others",
        panel=Panel.PORT,
        basic=True,
    )
    api: Literal["chat", "completions"] = wanted(
        "chat", "API that gets the questions", panel=Panel.PORT
    )
    tokenizer: Content[ModelPlace | None] = wanted(
        None,
        "tokenizer (directory or GGUF) to count prompt tokens if the server cannot, and to encode "
        "--data [the server's usage; --against]",
        "MODEL",
        panel=Panel.PORT,
    )
    parallel: Neutral[Annotated[Whole, Field(ge=1, le=256)]] = wanted(
        1, "questions sent at the same time", panel=Panel.PORT
    )
    deadline: Neutral[Count] = wanted(
        600, "seconds that one answer may take", "SECONDS", panel=Panel.PORT
    )
    context: Served[Length | None] = wanted(
        None, "tokens the model was trained on, if its config misstates them"
    )
    items: Served[Annotated[Whole, Field(ge=1, le=MOST_ITEMS)]] = wanted(
        8, "retrieval items per task, length and depth"
    )

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the tasks that `eval --endpoint` asks: --tasks, else `mkey` (several needles in
        one text)."""
        return self.tasks or ("mkey",)

    @property
    def reads_text(self) -> bool:
        """Return whether the options of `eval --endpoint` ask for the perplexity of texts."""
        return self.data is not None and self.haystack != "text"


ONLY = tuple(name for name in EndpointOptions.model_fields if name not in Evaluate.model_fields)


def is_port(given: Mapping[str, Any]) -> bool:
    """Return whether the option --endpoint is given. Without it, refuse each option that only the
    evaluation of a server has."""
    if given.get("endpoint") is not None:
        return True
    for name in ONLY:
        if name in given:
            raise UsageError(f"{flag(name)} is about a running server: give --endpoint URL too")
    return False


def port_options(given: Mapping[str, Any]) -> EndpointOptions:
    """Check the options given along with --endpoint. Refuse an option about a model that ropext
    loads."""
    for name in given:
        info = EndpointOptions.model_fields.get(name)
        is_served = info is not None and Trait.SERVED in info.metadata
        if name not in ONLY and not is_served:
            raise UsageError(
                f"{flag(name)} is about a model that ropext loads; with --endpoint the server has "
                "it: leave one of the two out"
            )
    options = EndpointOptions(**given)
    if options.quick and "items" not in given:
        options = options.changed(items=1)
    for name in options.asked:
        if not isinstance(name, OwnTask):
            wording_of(name)
    if options.lengths and options.lengths[-1] > LONGEST_TARGET:
        raise UsageError(f"--lengths go up to {LONGEST_TARGET} tokens")
    if options.haystack == "text" and options.data is None:
        raise UsageError("--haystack text needs --data; give it, or another haystack")
    if options.haystack == "noise":
        raise UsageError(
            "--haystack noise consists of token ids, and a server takes text; give another haystack"
        )
    if not options.depths or min(options.depths) < 0 or max(options.depths) > 1:
        raise UsageError("--depths takes numbers between 0 and 1")
    if len(options.depths) > MOST_DEPTHS:
        raise UsageError(f"--depths has more than {MOST_DEPTHS} numbers")
    return options
