"""Evaluate a running server. This module reads the user's texts; `ropext.endpoint` does the
rest."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ropext.base import guard
from ropext.base.errors import UsageError
from ropext.base.locks import check_unlocked
from ropext.base.narration import Call
from ropext.endpoint.measuring import measure_server
from ropext.endpoint.perplexity import ServerTexts
from ropext.endpoint.plan import ServerPlan, plan_lines, plan_server, reading_texts
from ropext.endpoint.report import write_server_report
from ropext.endpoint.shares import ServerMetrics
from ropext.endpoint.vocabulary import text_tokenizer
from ropext.files.inspecting import open_model
from ropext.options.endpoint import EndpointOptions, port_options
from ropext.options.fields import places_read
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement
from ropext.results.perplexity import MeasuredDocuments


def plan_server_evaluation(
    given: Mapping[str, Any],
    model: str | None,
    gates: Sequence[Gate] = (),
    output: Path | None = None,
) -> ServerPlan:
    """Do the steps of the whole command `eval --endpoint` before its first question: check the
    options, ask the server for its model, and plan the questions.

    Refuse a gate about anything else, and an output over, in or around an input.
    """
    options = port_options(given)
    guard.check(places_read(dict(options), EndpointOptions), {"--output": output})
    check_unlocked(output)
    if options.data is not None:
        from ropext.evaluation.corpus import (
            require_data,  # late: most evaluations of a server need no texts
        )
        from ropext.evaluation.documents import source_of

        require_data(source_of(options))
    plan = plan_server(options, model, _texts_around_needles(options))
    if plan.losses is not None:
        plan = reading_texts(plan, _documents_as_tokens(options, plan.wanted.lengths))
    asked = options.model_copy(update={"tasks": plan.wanted.tasks})
    reads_text = plan.reads is not None
    ServerMetrics(asked, plan.models, plan.wanted.lengths, reads_text=reads_text).check(gates)
    return plan


def evaluate_server(plan: ServerPlan, output: Path | None, call: Call) -> Measurement:
    """Do the whole command `eval --endpoint` after its planning step: ask every question that has
    no answer yet, and write the report."""
    for line in plan_lines(plan):
        call.hooks.say(line)
    return measure_server(plan, output, call, write_server_report)


def _texts_around_needles(options: EndpointOptions) -> tuple[str, ...]:
    """Do a step of the whole command `eval --endpoint` before the plan of its questions: read the
    texts of --data that surround its needles."""
    if options.data is None or options.haystack != "text":
        return ()
    # late: most evaluations of a server need no texts
    from ropext.evaluation.corpus import read_documents
    from ropext.evaluation.documents import source_of

    texts = list[str]()
    for document in read_documents(source_of(options)):
        if isinstance(document.content, str):
            texts.append(document.content)
        if len(texts) >= options.max_docs:
            break
    return tuple(texts)


def _documents_as_tokens(options: EndpointOptions, lengths: Sequence[int]) -> ServerTexts:
    """Do a step of the whole command `eval --endpoint` after the plan of its questions: read the
    documents for perplexity. An evaluation of a directory would read the same tokens."""
    import numpy as np

    from ropext.evaluation.corpus import DocumentEncoder, Wanted
    from ropext.evaluation.documents import read_corpus

    encoder = DocumentEncoder(text_tokenizer(_tokenizer_directory(options)), seed=options.seed)
    wanted = Wanted(tuple(lengths), given=True, max_documents=options.max_docs)
    corpus = read_corpus(options, encoder, wanted)
    documents = MeasuredDocuments(
        tuple(document.name for document in corpus.documents),
        tuple(document.prefix_hashes(lengths) for document in corpus.documents),
        tuple(document.token_bytes.astype(np.int64) for document in corpus.documents),
    )
    ids = tuple(document.ids for document in corpus.documents)
    return ServerTexts(documents, ids, encoder.bos, corpus.to_json())


def _tokenizer_directory(options: EndpointOptions) -> Path:
    """Return the directory of --tokenizer or --against of the whole command `eval --endpoint`. A
    step of the command encodes its texts with the tokenizer there, for the perplexity."""
    if options.tokenizer is not None:
        return Path(options.tokenizer)
    if options.against is None or Path(options.against).is_file():
        raise UsageError(
            "perplexity is read of token ids: give --tokenizer DIR, the model's directory, which "
            "encodes the texts of --data"
        )
    return open_model(options.against).directory
