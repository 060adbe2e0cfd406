"""Turn the body of a request into a question: parse it within bounds, check it, and encode its
prompt.

If a prompt leaves no room for an answer, ropext refuses it; it never truncates a prompt.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ropext.base.errors import InputError
from ropext.base.jsontext import CONTAINER_LIMIT, Json, JsonObject, parse_object
from ropext.models.tokenizer import tokenizer_panics_refused
from ropext.serving.logprobs import MOST_CANDIDATES
from ropext.serving.messages import rendered_chat
from ropext.serving.refusals import RequestRefusal, flag_in, object_in
from ropext.serving.served import ServedModel

if TYPE_CHECKING:
    from transformers import GenerationConfig

RequestBody = JsonObject
DEFAULT_COMPLETION = 16  # tokens of /v1/completions where max_tokens is not given, as OpenAI's
MOST_PROMPTS = 2048  # as OpenAI's
MOST_SCORED = 1 << 17  # tokens with log-probabilities, which take about 2 KiB each in memory
MOST_STOPS = 16  # OpenAI takes four
LARGEST = 2**63 - 1  # of a seed, and of every other whole number without a smaller limit
# Sampling settings that requests may name, in OpenAI's and in transformers' names.
# Smaller temperatures overflow the logits; on CUDA that ends every later call of the process.
COLDEST = 1e-3
LARGEST_BIAS = 100  # as OpenAI's
RANGES = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.1, 10.0),
}
# What would change the answer and is not done here -> the values that ask for nothing.
NOT_DONE: Mapping[str, tuple[Json, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "functions": (None, []),
    "audio": (None,),
    "modalities": (None, ["text"]),
}
NOT_IN_CHATS: Mapping[str, tuple[Json, ...]] = {
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
}


# A text is tokenised whole if so many characters for each token of the context are not too many
# tokens already. Its beginning alone may have a few tokens more than within the whole text.
CHARACTERS_A_TOKEN = 16
CUT_MARGIN = 256


@dataclass(frozen=True)
class CompletionRequest:
    """A client's checked prompt, with all settings of its answer."""

    id: str
    is_chat: bool
    ids: tuple[int, ...]
    settings: "GenerationConfig"
    stop: tuple[str, ...]
    seed: int | None
    stream: bool
    with_usage: bool
    echo: str | None  # the text of the prompt; None: the answer begins after it
    candidates: int | None  # for each token; None: no log-probabilities
    as_ids: bool  # whether a token's name in `logprobs` is its id

    @property
    def most(self) -> int:
        """Return the most tokens that the answer to this request may have."""
        return int(self.settings.max_new_tokens or 0)

    @property
    def scored(self) -> int:
        """Return the most tokens of which the answer to this request lists log-probabilities."""
        if self.candidates is None:
            return 0
        return self.most + (0 if self.echo is None else len(self.ids))


def parse_request(served: ServedModel, data: bytes) -> RequestBody:
    """Parse the JSON body of a client's request. Count its values first, because nothing else
    runs while JSON is parsed."""
    containers, commas = _values(data)
    most_containers = max(CONTAINER_LIMIT, served.limit)
    if containers > most_containers:
        raise RequestRefusal(f"the request holds more than {most_containers:,} objects and arrays")
    most_values = CONTAINER_LIMIT + 4 * served.limit
    if commas > most_values:
        raise RequestRefusal(f"the request holds more than {most_values:,} values")
    try:
        return parse_object(data, "the request", containers=len(data))
    except InputError as error:
        raise RequestRefusal(str(error)) from None


def _values(data: bytes) -> tuple[int, int]:
    """Count the objects and arrays of a request's JSON text, and its commas, outside of strings."""
    text = data.replace(rb"\\", b"").replace(rb"\"", b"")
    codes = np.frombuffer(text, np.uint8)
    outside = ~np.logical_xor.accumulate(codes == ord('"'))
    brackets = (codes == ord("[")) | (codes == ord("{"))
    commas = codes == ord(",")
    return int(np.count_nonzero(brackets & outside)), int(np.count_nonzero(commas & outside))


def completion_requests(
    served: ServedModel, body: RequestBody, name: str, is_chat: bool
) -> list[CompletionRequest]:
    """Check the body of a posted request and turn its prompts into tokens: one prompt, or a list
    of them for /v1/completions."""
    check_model(served, body.get("model"))
    refused = {**NOT_DONE, **NOT_IN_CHATS} if is_chat else NOT_DONE
    for key, nothing in refused.items():
        if body.get(key) not in nothing:
            raise RequestRefusal(
                f"{key}={str(body[key])[:60]} is not supported by ropext serve", 400, key
            )
    if is_chat:
        return [_completion_request(served, body, name, is_chat)]
    requests = [
        _completion_request(served, {**body, "prompt": prompt}, name, is_chat)
        for prompt in _prompts(body.get("prompt"))
    ]
    scored = sum(request.scored for request in requests)
    most = max(MOST_SCORED, served.limit)
    if scored > most:
        raise RequestRefusal(
            f"the request asks for logprobs of {scored:,} tokens, more than {most:,}; send fewer "
            "prompts at once",
            400,
            "logprobs",
        )
    return requests


def _prompts(given: Json) -> list[Json]:
    """Return the prompts of a posted request: a list of texts or of lists holds several, a list
    of token ids is one."""
    if not isinstance(given, list) or not given or not isinstance(given[0], str | list):
        return [given]
    if len(given) > MOST_PROMPTS:
        raise RequestRefusal(
            f"prompt holds {len(given):,} prompts, more than {MOST_PROMPTS}", 400, "prompt"
        )
    return given


def _completion_request(
    served: ServedModel, body: RequestBody, name: str, is_chat: bool
) -> CompletionRequest:
    """Check the body of a posted request with one prompt, and turn the prompt into tokens."""
    ids = prompt_ids(served, body, is_chat)
    if not ids:
        raise RequestRefusal("the prompt is empty", 400, "messages" if is_chat else "prompt")
    settings = _settings(served, body)
    settings.max_new_tokens = _room(served, body, len(ids), is_chat)
    stop = _stop_words(body.get("stop"))
    seed = _integer(body, "seed", -LARGEST)
    echo: str | None = None
    if flag_in(body, "echo"):
        echo = served.tokenizer.backend_tokenizer.decode(list(ids))
    candidates: int | None = None
    if not is_chat and body.get("logprobs") is not False:
        candidates = _integer(body, "logprobs", 0, MOST_CANDIDATES)
    return CompletionRequest(
        id=name,
        is_chat=is_chat,
        ids=ids,
        settings=settings,
        stop=stop,
        seed=seed,
        stream=flag_in(body, "stream"),
        with_usage=flag_in(object_in(body, "stream_options"), "include_usage"),
        echo=echo,
        candidates=candidates,
        as_ids=flag_in(body, "return_tokens_as_token_ids"),
    )


def check_model(served: ServedModel, name: Json) -> None:
    """Refuse a request that names another model than the served one; a request without a name
    means that one."""
    if name is not None and name not in served.names:
        names = " and ".join(map(repr, served.names))
        raise RequestRefusal(
            f"The model {str(name)[:200]!r} does not exist; this server has {names}",
            404,
            "model",
            "model_not_found",
        )


def prompt_ids(served: ServedModel, body: RequestBody, is_chat: bool) -> tuple[int, ...]:
    """Return the tokens of a posted request's messages (through the chat template), or of its
    prompt."""
    if is_chat:
        text = rendered_chat(served, body)
        return tuple(_encoded(served, text, False, "messages"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        special = flag_in(body, "add_special_tokens", True)
        return tuple(_encoded(served, prompt, special, "prompt"))
    last = served.vocabulary - 1
    if isinstance(prompt, list) and all(type(t) is int and 0 <= t <= last for t in prompt):
        return tuple(prompt)
    raise RequestRefusal(
        f"prompt must be a text, token ids from 0 to {last}, or a list of these", 400, "prompt"
    )


def _encoded(served: ServedModel, text: str, special: bool, param: str) -> list[int]:
    """Return the tokens of the text of a posted prompt or conversation.

    Refuse a text that is much longer than the served model's context before it is encoded whole;
    `_room` refuses the others.
    """
    if len(text) > served.most_bytes:  # a chat template can make much of little
        raise _too_long(served, f"your {param} have {len(text)} characters", param)
    clean = text.encode("utf-8", "replace").decode()  # JSON can escape half of a surrogate pair
    size = served.limit * CHARACTERS_A_TOKEN
    try:
        with tokenizer_panics_refused(served.name, f"the {param}"):
            ids = served.tokenizer(clean[:size], add_special_tokens=special)["input_ids"]
            if len(clean) > size and len(ids) > served.limit + CUT_MARGIN:
                raise _too_long(
                    served, f"your {param} resulted in more than {len(ids)} tokens", param
                )
            if len(clean) > size:
                ids = served.tokenizer(clean, add_special_tokens=special)["input_ids"]
    except InputError as error:
        raise RequestRefusal(str(error), 400, param) from None
    return list(ids)


def _room(served: ServedModel, body: RequestBody, asked: int, is_chat: bool) -> int:
    """Return the most tokens of a request's answer; refuse in OpenAI's words a prompt that does
    not fit."""
    part = "messages" if is_chat else "prompt"
    least = 0 if flag_in(body, "echo") else 1
    wanted = _integer(body, "max_completion_tokens", least)
    if wanted is None:
        wanted = _integer(body, "max_tokens", least)
    if wanted is None:
        wanted = _integer(_generation_config(body), "max_new_tokens", 1)
    if wanted is None and not is_chat:
        wanted = min(DEFAULT_COMPLETION, max(1, served.limit - asked))
    if wanted != 0 and asked >= served.limit:
        raise _too_long(served, f"your {part} resulted in {asked} tokens", part)
    if wanted is not None and asked + wanted > served.limit:
        parts = f"{asked} in the {part}, {wanted} in the completion"
        raise _too_long(served, f"you requested {asked + wanted} tokens ({parts})", part)
    return served.limit - asked if wanted is None else int(wanted)


def _too_long(served: ServedModel, what: str, part: str) -> RequestRefusal:
    """Return the refusal of a prompt that exceeds the served model's context, in OpenAI's words."""
    return RequestRefusal(
        f"This model's maximum context length is {served.limit} tokens. However, {what}. "
        f"Please reduce the length of the {part} or completion.",
        400,
        part,
        "context_length_exceeded",
    )


def _settings(served: ServedModel, body: RequestBody) -> "GenerationConfig":
    """Build the sampling settings of a request: the served model's own, then the request's in
    transformers' names, then OpenAI's."""
    settings: GenerationConfig = copy.deepcopy(served.model.generation_config)
    settings.num_beams = settings.num_return_sequences = 1
    settings.return_dict_in_generate = False
    settings.use_cache = True
    for name in ("max_length", "min_length", "stop_strings", "cache_implementation", "max_time"):
        setattr(settings, name, 0 if name == "min_length" else None)
    stated = _generation_config(body) | dict(body)
    sampling = flag_in(stated, "do_sample", bool(settings.do_sample))
    if body.get("temperature") is not None:
        sampling = body["temperature"] != 0
    elif body.get("top_p") is not None:
        sampling = True  # the temperature is then the model's own, or 1
    for name, (low, high) in RANGES.items():
        value = _number(stated, name, low, high)
        if value is not None:
            setattr(settings, name, value)
    temperature = settings.temperature
    if temperature and temperature < COLDEST:
        raise RequestRefusal(f"temperature must be 0, or at least {COLDEST}", 400, "temperature")
    top_k = _integer(stated, "top_k", -1)
    if top_k is not None:
        settings.top_k = max(top_k, 0)
    settings.do_sample = sampling
    if not sampling:  # transformers warns of sampling settings
        settings.temperature = settings.top_p = settings.top_k = settings.min_p = None
    if bias := _bias(served, object_in(body, "logit_bias")):
        settings.sequence_bias = bias
    if settings.pad_token_id is None:
        end = settings.eos_token_id
        settings.pad_token_id = end[0] if isinstance(end, list) and end else end
    return settings


def _generation_config(body: RequestBody) -> dict[str, Json]:
    """Read the sampling settings and the length from the GenerationConfig that `transformers
    chat` posts as JSON in a string."""
    text = body.get("generation_config")
    if text is None:
        return {}
    try:
        given = json.loads(text)
        names = (*RANGES, "top_k", "do_sample", "max_new_tokens")
        return {name: given[name] for name in names if given.get(name) is not None}
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise RequestRefusal(
            "generation_config must be a JSON object in a string", 400, "generation_config"
        ) from None


def _bias(served: ServedModel, given: JsonObject) -> dict[tuple[int, ...], float]:
    """Read a request's `logit_bias` in OpenAI's form and return it by tokens."""
    bias: dict[tuple[int, ...], float] = {}
    for token, value in given.items():
        is_token = token.isdecimal() and len(token) < 20 and int(token) < served.vocabulary
        if not is_token or type(value) not in (int, float) or not abs(value) <= LARGEST_BIAS:
            words = (
                f"logit_bias must be numbers from -{LARGEST_BIAS} to {LARGEST_BIAS} by token ids"
            )
            raise RequestRefusal(words, 400, "logit_bias")
        bias[int(token),] = float(value)
    return bias


def _stop_words(given: Json) -> tuple[str, ...]:
    """Read a request's `stop`, one text or several."""
    words = [given] if isinstance(given, str) else [] if given is None else given
    right = isinstance(words, list) and all(isinstance(word, str) and word for word in words)
    if not right or len(words) > MOST_STOPS:
        raise RequestRefusal(f"stop must be a text, or at most {MOST_STOPS} texts", 400, "stop")
    return tuple(words)


def _number(body: RequestBody, name: str, low: float, high: float) -> float | None:
    """Read a number from the body of a client's request, None if it is not given; refuse another
    type, or a value out of range."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not low <= value <= high:
        raise RequestRefusal(f"{name} must be a number from {low:g} to {high:g}", 400, name)
    return float(value)


def _integer(body: RequestBody, name: str, low: int, high: int = LARGEST) -> int | None:
    """Read a whole number from the body of a client's request, None if it is not given; refuse
    another type, or a value out of range."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise RequestRefusal(f"{name} must be a whole number from {low} to {high}", 400, name)
    return value
