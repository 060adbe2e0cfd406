"""Let questions wait for their turn on one thread, and keep the cache of the last one for the
next."""

import asyncio
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from transformers import Cache, StoppingCriteria
from transformers.cli.serving.utils import (
    DirectStreamer,
    ReasoningText,
    ToolCall,
    _GenerationCancelled,
    _StreamError,
    get_response_template,
)

from ropext.base.errors import InputError
from ropext.base.jsontext import Json
from ropext.base.narration import Say
from ropext.evaluation.forward import TokenScorer
from ropext.models.load import silenced
from ropext.models.tokenizer import ask_sandbox
from ropext.serving.logprobs import TokenLogprob, logprob_scorer, openai_logprobs, token_logprobs
from ropext.serving.questions import CompletionRequest, RequestBody, completion_requests
from ropext.serving.refusals import RequestRefusal
from ropext.serving.served import ServedModel, new_cache

MOST_WAITING = 64  # questions; the server refuses more
AnswerPiece = str | ReasoningText | ToolCall | _StreamError | None  # None ends an answer


class ChildParser:
    """A parser of thoughts and tool calls in an answer, by the model's response template.

    Its regular expressions run in a child process with limits. The first call happens when the
    model writes, because it decodes and searches the prompt, which takes time.
    """

    initial_events: Sequence[Json] = ()  # they come with the events of the first piece

    def __init__(self, served: ServedModel, ids: Sequence[int]) -> None:
        self.served = served
        self.ids = ids  # the prompt's
        # until the first call
        self.template = get_response_template(served.tokenizer, served.model)

    def feed(self, text: str) -> Json:
        """Return the events (text, thoughts, tool calls) of the next piece of a served answer."""
        try:
            return self._parse_answer(text, ends=False)
        except ValueError as error:
            raise self._template_refusal(error) from None

    def finalize(self) -> tuple[Json, Json]:
        """Return the last events of a served answer; the streamer reads a ValueError as an
        answer that was cut short."""
        return {}, self._parse_answer("", ends=True)

    def _parse_answer(self, text: str, ends: bool) -> Json:
        """Return the child's events for a piece of a served answer; the first call also sends
        the template and the prompt."""
        question: dict[str, Json] = {"template": None, "prompt": "", "text": text, "ends": ends}
        if self.template is not None:
            question["template"] = self.template
            question["prompt"] = self.served.tokenizer.decode(list(self.ids))
            self.template = None
        try:
            return ask_sandbox("parse", question)
        except TimeoutError as error:
            raise self._template_refusal(error) from None

    def _template_refusal(self, error: Exception) -> RequestRefusal:
        """Return the refusal of a request whose answer the response template cannot parse."""
        sentence = f"the response template of {self.served.name} fails on this answer: {error}"
        return RequestRefusal(sentence, 500)


def _check_response_template(served: ServedModel) -> None:
    """Refuse to serve a model whose response_template in tokenizer_config.json is wrong."""
    template = get_response_template(served.tokenizer, served.model)
    if template is None:
        return
    try:
        ask_sandbox("parse", {"template": template, "prompt": "", "text": "", "ends": False})
    except (ValueError, TimeoutError) as error:
        raise InputError(
            f"response_template in tokenizer_config.json of {served.name} is wrong: {error}; "
            "correct it, or remove it, and tool calls come as text"
        ) from None


class AnswerStreamer(DirectStreamer):
    """transformers' streamer, which also holds back the possible beginning of a stop word, and ends
    at a stop word."""

    def __init__(self, served: ServedModel, question: CompletionRequest) -> None:
        parser = None
        if question.is_chat and get_response_template(served.tokenizer, served.model) is not None:
            parser = ChildParser(served, question.ids)
        self.question = question
        self.pieces = asyncio.Queue[AnswerPiece]()  # the pieces of the answer, for the client
        self.decoded = ""  # before stop words are looked for
        self.held = ""
        self.stopped = False
        self.ids: list[int] = []  # the tokens of the answer so far
        self.kept = 0  # tokens of the prompt that the kept cache held
        self.logprobs: Json = None  # of the answer, in OpenAI's form
        rust = served.tokenizer.backend_tokenizer
        loop = asyncio.get_running_loop()
        # A ChildParser has every method of transformers' parser that the streamer calls.
        super().__init__(rust, loop, self.pieces, response_parser=parser)  # type: ignore[arg-type]

    @property
    def client_has_left(self) -> bool:
        """Return whether the client of this answer has disconnected."""
        return bool(self._cancelled.is_set())

    def put(self, value: torch.Tensor) -> None:
        """Take the next token of a served answer; ignore tokens that a GPU made after a stop
        word."""
        if self.stopped:
            return
        is_prompt = self._first
        super().put(value)
        if not is_prompt:
            self.ids.extend(value.tolist())

    def end(self) -> None:
        """End a served answer, with the bytes of a character that the last token left
        unfinished."""
        if self._parser is None:
            text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
            if text.startswith(self.decoded):
                self._send_before_stop_word(text[len(self.decoded) :])
        super().end()

    def _enqueue(self, item: AnswerPiece) -> None:
        """Put a piece of the answer into the client's queue, except text that may begin a stop
        word."""
        if type(item) is str:
            self.decoded += item
            self._send_before_stop_word(item)
            return
        if self.held and not self.stopped:
            super()._enqueue(self.held)
        self.held = ""
        if item is not None and not self.stopped:
            super()._enqueue(item)

    def close(self) -> None:
        """Tell the client that the answer is complete; the log-probabilities come after `end`."""
        super()._enqueue(None)

    def _send_before_stop_word(self, text: str) -> None:
        """Send the text before a stop word to the client; hold back text that can begin one."""
        if self.stopped:
            return
        text = self.held + text
        places = [text.find(word) for word in self.question.stop if word in text]
        if places:
            self.stopped = True
            end = min(places)
            self.held = ""
        else:
            end = len(text) - _stop_word_beginning(text, self.question.stop)
            self.held = text[end:]
        if end:
            super()._enqueue(text[:end])

    def fail(self, sentence: str) -> None:
        """End a client's answer with an error."""
        super()._enqueue(_StreamError(sentence))


def _stop_word_beginning(text: str, words: Sequence[str]) -> int:
    """Return how many of the last characters of a served answer are the beginning of one of the
    stop words."""
    most = max((len(word) for word in words), default=1) - 1
    for count in range(min(most, len(text)), 0, -1):
        if any(word.startswith(text[-count:]) for word in words):
            return count
    return 0


@dataclass(frozen=True)
class StopWord(StoppingCriteria):
    """A criterion that ends a generation after its streamer has seen a stop word."""

    streamer: AnswerStreamer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        """Return, for `generate`, whether the served answer has met a stop word."""
        return torch.full((len(input_ids),), self.streamer.stopped, device=input_ids.device)


class ServedPromptCache:
    """The KV cache of the last prompt that the server answered, with its answer."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.tokens: list[int] = []  # that it holds

    def take(self, model: Any, ids: Sequence[int]) -> tuple[Cache, int]:
        """Return a KV cache that holds the longest beginning which this prompt shares with the
        last one and its answer, and the number of its tokens.

        At least one token remains to be read.
        """
        common = 0
        for old, new in zip(self.tokens, ids[:-1], strict=False):
            if old != new:
                break
            common += 1
        cache = self.cache
        surplus = len(self.tokens) - common
        self.forget()
        if cache is None or common == 0:
            return new_cache(model), 0
        if surplus:
            try:
                cache.crop(-surplus)
            except (RuntimeError, ValueError):  # a window has dropped what would be needed again
                return new_cache(model), 0
        return cache, common

    def keep(self, cache: Cache, tokens: list[int]) -> None:
        """Keep a KV cache of these tokens for the next prompt; if the model did not read the
        last one, keep it for those before."""
        self.cache = cache
        self.tokens = tokens[: cache.get_seq_length()]

    def forget(self) -> None:
        """Free the memory of the KV cache of the last answered prompt."""
        self.cache = None
        self.tokens = []


class AnswerThread:
    """A thread of the server that answers one client's prompt after the other."""

    def __init__(self, served: ServedModel, say: Say) -> None:
        self.served = served
        self.say = say
        self.questions = SimpleQueue[AnswerStreamer]()
        self.kept = ServedPromptCache()
        self.lock = threading.Lock()
        self.waiting = 0
        # One thread for all: CUDA graphs of `torch.compile` belong to the thread that made them.
        self.thread = threading.Thread(target=self._answer_questions, daemon=True)
        self.thread.start()

    def ask(self, question: CompletionRequest) -> AnswerStreamer:
        """Put the prompt of an OpenAI client into the server's line, and return the streamer of its
        answer; refuse it if MOST_WAITING prompts wait, or if the thread has ended."""
        if not self.thread.is_alive():
            raise RequestRefusal("the thread that answers has ended; restart the server", 503)
        streamer = AnswerStreamer(self.served, question)
        with self.lock:
            before = self.waiting
            if before < MOST_WAITING:
                self.waiting += 1
        if before >= MOST_WAITING:
            raise RequestRefusal(f"{before} questions are waiting; ask again later", 503)
        place = f", {before} before it" if before else ""
        self.say(f"{question.id}: {len(question.ids):,} tokens{place}")
        self.questions.put(streamer)
        return streamer

    def check(self) -> None:
        """Refuse to serve a model that cannot answer, because its response template or its own
        settings fail.

        Try a prompt of one token twice: with these settings, and without sampling.
        """
        _check_response_template(self.served)
        with silenced():
            asyncio.run(self._answer_trial({}))
            asyncio.run(self._answer_trial({"temperature": 0}))
        self.kept.forget()

    async def _answer_trial(self, settings: RequestBody) -> None:
        """Answer a prompt of one token; refuse to serve a model that fails on it."""
        name = self.served.name
        try:
            body = {"prompt": [0], "max_tokens": 2, **settings}
            (question,) = completion_requests(self.served, body, "trial", is_chat=False)
            self._generate_answer(AnswerStreamer(self.served, question))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"{name} cannot answer a question of one token: {reason}; if its "
                "generation_config.json sets this, remove the setting"
            ) from error

    def _answer_questions(self) -> None:
        """Answer the waiting prompts of clients, one after the other, until the server ends."""
        while True:
            streamer = self.questions.get()
            self._answer_question(streamer)
            del streamer  # frees its memory while the thread waits for the next question

    def _answer_question(self, streamer: AnswerStreamer) -> None:
        """Answer a client's prompt on the thread; whatever fails, the next prompt gets its turn."""
        try:
            if not streamer.client_has_left:
                self._generate_answer(streamer)
        except _GenerationCancelled:
            pass
        except (RequestRefusal, InputError) as error:
            streamer.fail(str(error))
        except BaseException as error:  # a bug, no memory, a panic of `tokenizers`: the log has it
            self.kept.forget()
            self.say("".join(traceback.format_exception(error)))
            streamer.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            with self.lock:
                self.waiting -= 1
            left = ", its client has gone" if streamer.client_has_left else ""
            question = streamer.question
            read = len(question.ids) - streamer.kept
            self.say(
                f"{question.id}: {streamer.kept:,} tokens kept, {read:,} read, "
                f"{len(streamer.ids):,} written{left}"
            )

    def _generate_answer(self, streamer: AnswerStreamer) -> None:
        """Write the answer to a client's prompt, with the log-probabilities that the request
        asks for."""
        question = streamer.question
        scores: list[TokenLogprob | None] = []
        if question.candidates is not None and question.echo is not None:
            scores = [None, *self._logprobs_from(streamer, question.ids, 1)]
        if question.most:
            self._generate_tokens(streamer)
        if scores:
            streamer.kept = 0  # the prompt was read for its scores
        if question.candidates is not None:
            ids = [*question.ids, *streamer.ids]
            scores += self._logprobs_from(streamer, ids, len(question.ids))
            scored = ids[len(ids) - len(scores) :]
            tokenizer = self.served.tokenizer
            streamer.logprobs = openai_logprobs(tokenizer, scored, scores, question.as_ids)
        streamer.close()

    def _logprobs_from(
        self, streamer: AnswerStreamer, ids: Sequence[int], first: int
    ) -> list[TokenLogprob]:
        """Return the log-probabilities of the tokens of a prompt and its answer from `first` on,
        each by all tokens before it.

        A kept KV cache holds the tokens that were read already, as after an answer.
        """
        read = np.asarray(ids[:-1], np.int32)
        scores: list[TokenLogprob] = []
        candidates = streamer.question.candidates or 0
        if first > len(read):
            return scores
        cache: Cache | None = None
        kept = 0
        if self.served.continues:
            cache, kept = self.kept.take(self.served.model, ids[:first])
        with torch.no_grad():
            for begin, logits in self.scorer.logits(read[kept:], first - 1 - kept, cache):
                if streamer.client_has_left:
                    raise _GenerationCancelled
                start = max(first, kept + begin + 1)
                end = kept + begin + 1 + len(logits)
                rows = logits[start - end :]
                scores += token_logprobs(rows, ids[start:end], candidates)
        if cache is not None:
            self.kept.keep(cache, list(ids))
        return scores

    @cached_property
    def scorer(self) -> TokenScorer:
        """Return the scorer of log-probabilities, made for the first request that asks for
        `logprobs`."""
        return logprob_scorer(self.served)

    def _generate_tokens(self, streamer: AnswerStreamer) -> None:
        """Generate the tokens of a served answer. If the prompt shares a beginning with the last
        one, reuse the kept cache for it."""
        question = streamer.question
        model = self.served.model
        ids = torch.tensor([question.ids], device=model.device)
        if question.seed is not None:
            torch.manual_seed(question.seed)
        how: dict[str, object] = {
            "attention_mask": torch.ones_like(ids),
            "generation_config": question.settings,
            "streamer": streamer,
            "stopping_criteria": [StopWord(streamer)],
        }
        if not self.served.continues:
            model.generate(ids, **how)
            return
        cache, streamer.kept = self.kept.take(model, question.ids)
        try:
            self._read_prompt(ids, cache, streamer)
            model.generate(ids, past_key_values=cache, **how)
        finally:
            if cache.get_seq_length():
                self.kept.keep(cache, [*question.ids, *streamer.ids])

    def _read_prompt(self, ids: torch.Tensor, cache: Cache, streamer: AnswerStreamer) -> None:
        """Read all of a client's long prompt except its last piece, which `generate` reads."""
        end = ids.shape[1]
        piece = self.served.piece
        with torch.no_grad():
            for begin in range(streamer.kept, end - piece, piece):
                if streamer.client_has_left:
                    raise _GenerationCancelled
                part = ids[:, begin : begin + piece]
                self.served.model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
