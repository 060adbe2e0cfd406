"""Let questions wait for their turn on one thread, and keep the cache of the last one for the
next."""

import asyncio
import threading
import traceback
from collections.abc import Sequence
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
from ropext.models.tokenizer import ask
from ropext.serving.logprobs import TokenScore, as_openai, scorer_of, scores_of
from ropext.serving.questions import Body, Turn, questions_of
from ropext.serving.refusals import Refusal
from ropext.serving.served import LiveModel, new_cache

MOST_WAITING = 64  # questions; the server refuses more
Item = str | ReasoningText | ToolCall | _StreamError | None  # None ends an answer


class ChildParser:
    """A parser of thoughts and tool calls in an answer, by the model's response template.

    Its regular expressions run in a child process with limits. The first call happens when the
    model writes, because it decodes and searches the prompt, which takes time.
    """

    initial_events: Sequence[Json] = ()  # they come with the events of the first piece

    def __init__(self, served: LiveModel, ids: Sequence[int]) -> None:
        self.served = served
        self.ids = ids  # the prompt's
        # until the first call
        self.template = get_response_template(served.tokenizer, served.model)

    def feed(self, text: str) -> Json:
        """Return the events of the next piece."""
        try:
            return self._asked(text, ends=False)
        except ValueError as error:
            raise self._failed(error) from None

    def finalize(self) -> tuple[Json, Json]:
        """Return the last events; the streamer reads a ValueError as an answer that was cut
        short."""
        return {}, self._asked("", ends=True)

    def _asked(self, text: str, ends: bool) -> Json:
        question: dict[str, Json] = {"template": None, "prompt": "", "text": text, "ends": ends}
        if self.template is not None:
            question["template"] = self.template
            question["prompt"] = self.served.tokenizer.decode(list(self.ids))
            self.template = None
        try:
            return ask("parse", question)
        except TimeoutError as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> Refusal:
        sentence = f"the response template of {self.served.name} fails on this answer: {error}"
        return Refusal(sentence, 500)


def _check_template(served: LiveModel) -> None:
    template = get_response_template(served.tokenizer, served.model)
    if template is None:
        return
    try:
        ask("parse", {"template": template, "prompt": "", "text": "", "ends": False})
    except (ValueError, TimeoutError) as error:
        raise InputError(
            f"response_template in tokenizer_config.json of {served.name} is wrong: {error}; "
            "correct it, or remove it, and tool calls come as text"
        ) from None


class TurnStreamer(DirectStreamer):
    """transformers' streamer, which also holds back the possible beginning of a stop word, and ends
    at a stop word."""

    def __init__(self, served: LiveModel, question: Turn) -> None:
        parser = None
        if question.is_chat and get_response_template(served.tokenizer, served.model) is not None:
            parser = ChildParser(served, question.ids)
        self.items = asyncio.Queue[Item]()  # the pieces of the answer, for the client
        self.stop = question.stop
        self.decoded = ""  # before stop words are looked for
        self.held = ""
        self.stopped = False
        self.ids: list[int] = []  # the tokens of the answer so far
        self.kept = 0  # tokens of the prompt that the kept cache held
        self.logprobs: Json = None  # of the answer, in OpenAI's form
        rust = served.tokenizer.backend_tokenizer
        loop = asyncio.get_running_loop()
        # A ChildParser has every method of transformers' parser that the streamer calls.
        super().__init__(rust, loop, self.items, response_parser=parser)  # type: ignore[arg-type]

    @property
    def has_left(self) -> bool:
        """Whether the client has disconnected."""
        return bool(self._cancelled.is_set())

    def put(self, value: torch.Tensor) -> None:
        """Take the next token; ignore tokens that a GPU made after a stop word."""
        if self.stopped:
            return
        is_prompt = self._first
        super().put(value)
        if not is_prompt:
            self.ids.extend(value.tolist())

    def end(self) -> None:
        """End the answer, with the bytes of a character that the last token left unfinished."""
        if self._parser is None:
            text = self._tokenizer.decode(self.ids, skip_special_tokens=True)
            if text.startswith(self.decoded):
                self._pass_on(text[len(self.decoded) :])
        super().end()

    def _enqueue(self, item: Item) -> None:
        if type(item) is str:
            self.decoded += item
            self._pass_on(item)
            return
        if self.held and not self.stopped:
            super()._enqueue(self.held)
        self.held = ""
        if item is not None and not self.stopped:
            super()._enqueue(item)

    def close(self) -> None:
        """Tell the client that the answer is complete; the log-probabilities come after `end`."""
        super()._enqueue(None)

    def _pass_on(self, text: str) -> None:
        """Send the text before a stop word to the client; hold back text that can begin one."""
        if self.stopped:
            return
        text = self.held + text
        places = [text.find(word) for word in self.stop if word in text]
        if places:
            self.stopped = True
            end = min(places)
            self.held = ""
        else:
            end = len(text) - _beginning(text, self.stop)
            self.held = text[end:]
        if end:
            super()._enqueue(text[:end])

    def fail(self, sentence: str) -> None:
        """End the answer with an error."""
        super()._enqueue(_StreamError(sentence))


def _beginning(text: str, words: Sequence[str]) -> int:
    """Return how many of the last characters of a text are the beginning of one of the words."""
    most = max((len(word) for word in words), default=1) - 1
    for count in range(min(most, len(text)), 0, -1):
        if any(word.startswith(text[-count:]) for word in words):
            return count
    return 0


class StopWord(StoppingCriteria):
    """A criterion that ends a generation after its streamer has seen a stop word."""

    def __init__(self, streamer: TurnStreamer) -> None:
        self.streamer = streamer

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.streamer.stopped, device=input_ids.device)


class KeptCache:
    """The cache of the last question and its answer."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.tokens: list[int] = []  # that it holds

    def take(self, model: Any, ids: Sequence[int]) -> tuple[Cache, int]:
        """Return a cache that holds the longest common beginning, and the number of its tokens.

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
        """Keep a cache of these tokens; if the model did not read the last one, keep it for those
        before."""
        self.cache = cache
        self.tokens = tokens[: cache.get_seq_length()]

    def forget(self) -> None:
        """Free the memory of the cache."""
        self.cache = None
        self.tokens = []


class Worker:
    """A thread that answers one question after the other."""

    def __init__(self, served: LiveModel, say: Say) -> None:
        self.served = served
        self.say = say
        self.questions = SimpleQueue[tuple[Turn, TurnStreamer]]()
        self.kept = KeptCache()
        self.lock = threading.Lock()
        self.waiting = 0
        # One thread for all: CUDA graphs of `torch.compile` belong to the thread that made them.
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def ask(self, question: Turn) -> TurnStreamer:
        """Put a question into the line; its answer comes through the streamer's queue."""
        if not self.thread.is_alive():
            raise Refusal("the thread that answers has ended; restart the server", 503)
        streamer = TurnStreamer(self.served, question)
        with self.lock:
            before = self.waiting
            if before < MOST_WAITING:
                self.waiting += 1
        if before >= MOST_WAITING:
            raise Refusal(f"{before} questions are waiting; ask again later", 503)
        place = f", {before} before it" if before else ""
        self.say(f"{question.id}: {len(question.ids):,} tokens{place}")
        self.questions.put((question, streamer))
        return streamer

    def check(self) -> None:
        """Refuse a model that cannot answer, because its response template or its own settings
        fail.

        Try two short questions, with these settings and without sampling.
        """
        _check_template(self.served)
        with silenced():
            asyncio.run(self._tried({}))
            asyncio.run(self._tried({"temperature": 0}))
        self.kept.forget()

    async def _tried(self, settings: Body) -> None:
        name = self.served.name
        try:
            body = {"prompt": [0], "max_tokens": 2, **settings}
            (question,) = questions_of(self.served, body, "trial", is_chat=False)
            self._generate(question, TurnStreamer(self.served, question))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"{name} cannot answer a question of one token: {reason}; if its "
                "generation_config.json sets this, remove the setting"
            ) from error

    def _work(self) -> None:
        while True:
            question, streamer = self.questions.get()
            self._answer(question, streamer)
            # frees their memory while the thread waits for the next question
            del question, streamer

    def _answer(self, question: Turn, streamer: TurnStreamer) -> None:
        """Answer on the thread; whatever fails, the next question gets its turn."""
        try:
            if not streamer.has_left:
                self._generate(question, streamer)
        except _GenerationCancelled:
            pass
        except (Refusal, InputError) as error:
            streamer.fail(str(error))
        except BaseException as error:  # a bug, no memory, a panic of `tokenizers`: the log has it
            self.kept.forget()
            self.say("".join(traceback.format_exception(error)))
            streamer.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            with self.lock:
                self.waiting -= 1
            left = ", its client has gone" if streamer.has_left else ""
            read = len(question.ids) - streamer.kept
            self.say(
                f"{question.id}: {streamer.kept:,} tokens kept, {read:,} read, "
                f"{len(streamer.ids):,} written{left}"
            )

    def _generate(self, question: Turn, streamer: TurnStreamer) -> None:
        """Write the answer, with the log-probabilities that the question asks for."""
        details = question.details
        scores: list[TokenScore | None] = []
        if details.candidates is not None and details.echo is not None:
            scores = [None, *self._scores(question, question.ids, 1, streamer)]
        if question.most:
            self._write(question, streamer)
        if scores:
            streamer.kept = 0  # the prompt was read for its scores
        if details.candidates is not None:
            ids = [*question.ids, *streamer.ids]
            scores += self._scores(question, ids, len(question.ids), streamer)
            scored = ids[len(ids) - len(scores) :]
            tokenizer = self.served.tokenizer
            streamer.logprobs = as_openai(tokenizer, scored, scores, details.as_ids)
        streamer.close()

    def _scores(
        self, question: Turn, ids: Sequence[int], first: int, streamer: TurnStreamer
    ) -> list[TokenScore]:
        """Return the scores of the tokens from `first` on, each by all tokens before it.

        A kept cache holds the tokens that were read already, as after an answer.
        """
        read = np.asarray(ids[:-1], np.int32)
        scores: list[TokenScore] = []
        if first > len(read):
            return scores
        cache: Cache | None = None
        kept = 0
        if self.served.continues:
            cache, kept = self.kept.take(self.served.model, ids[:first])
        with torch.no_grad():
            for begin, logits in self.scorer.logits(read[kept:], first - 1 - kept, cache):
                if streamer.has_left:
                    raise _GenerationCancelled
                start = max(first, kept + begin + 1)
                end = kept + begin + 1 + len(logits)
                rows = logits[start - end :]
                scores += scores_of(rows, ids[start:end], question.details.candidates or 0)
        if cache is not None:
            self.kept.keep(cache, list(ids))
        return scores

    @cached_property
    def scorer(self) -> TokenScorer:
        """Return what computes log-probabilities, made for the first question that asks for
        them."""
        return scorer_of(self.served)

    def _write(self, question: Turn, streamer: TurnStreamer) -> None:
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
            self._read(ids, cache, streamer)
            model.generate(ids, past_key_values=cache, **how)
        finally:
            if cache.get_seq_length():
                self.kept.keep(cache, [*question.ids, *streamer.ids])

    def _read(self, ids: torch.Tensor, cache: Cache, streamer: TurnStreamer) -> None:
        """Read all of a long prompt except its last piece, which `generate` reads."""
        end = ids.shape[1]
        piece = self.served.piece
        with torch.no_grad():
            for begin in range(streamer.kept, end - piece, piece):
                if streamer.has_left:
                    raise _GenerationCancelled
                part = ids[:, begin : begin + piece]
                self.served.model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
