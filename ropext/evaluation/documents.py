"""Choose the documents and their lengths, and build the questions and their haystack, with warnings
about them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from ropext.base.errors import InputError, UsageError
from ropext.base.jsontext import Json, json_lines
from ropext.base.lengths import doubling_grid, length_text, lengths_text
from ropext.evaluation.corpus import (
    Corpus,
    DocumentEncoder,
    Source,
    Wanted,
    choose_documents,
    texts_of,
    unread_files,
)
from ropext.evaluation.corpus.selection import REMEDY, WINDOWS
from ropext.evaluation.lineup import Lineup
from ropext.evaluation.variants import in_memory_model_of
from ropext.families.config import defaults_of, locate, text_part
from ropext.families.described import remembered_facts
from ropext.files.checkpoint import Snapshot
from ropext.models.load import silenced
from ropext.models.tokenizer import load_tokenizer
from ropext.options.evaluate import Evaluate, Measuring
from ropext.results import EXTENDED
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.tasks import (
    Haystack,
    Item,
    OwnTask,
    check_amount,
    find_task,
    noise,
    passages,
    repetition,
    running_text,
)
from ropext.tasks.item import LengthTooShort
from ropext.tasks.own import own_items, read_questions
from ropext.tasks.passages import KnownAnswer


@dataclass(frozen=True)
class DocumentWords:
    """The words of the command that reads documents, for errors about them."""

    data: str = "--data"  # the option that names them
    shorter: str = "shorter --lengths"  # the remedy if none is long enough


AS_EVAL = DocumentWords()


def encoder_of(snapshot: Snapshot, options: Measuring, trust_remote_code: bool) -> DocumentEncoder:
    """Return the encoder that turns documents and questions into a model's tokens, for an
    evaluation or for a choice of methods."""
    held = in_memory_model_of(snapshot)
    with silenced():
        tokenizer = held.tokenizer if held else load_tokenizer(snapshot, trust_remote_code)
    vocabulary = _vocabulary_size(snapshot.config)
    encoder = DocumentEncoder(tokenizer, vocabulary, options.seed, options.chat)
    encoder.template_args = options.template_args
    return encoder


def _vocabulary_size(config: dict[str, Json]) -> int | None:
    """Return the number of embeddings, which bounds the ids of encoded documents: as config.json
    states it, or else the default of its model type; None if there is neither."""
    part = config
    if not config.get("vocab_size"):
        found = locate(config)
        default = defaults_of(found.text_type, remembered_facts(config)).get("vocab_size")
        part = {"vocab_size": default} | text_part(config, found.path)
    size = part.get("vocab_size")
    return size if isinstance(size, int) else None


def settle_documents(
    lineup: Lineup,
    options: Evaluate,
    encoder: DocumentEncoder,
    *,
    stops: bool,
    words: DocumentWords = AS_EVAL,
) -> tuple[Corpus | None, tuple[int, ...], list[str]]:
    """Return the documents, the lengths at which models read them, and warnings about both.

    With `stops`, raise InputError if too few documents reach the target of an extension, because
    the user asks about that length.
    """
    corpus = None
    warnings = list[str]()
    grid = options.lengths or doubling_grid(lineup.context, lineup.limit)
    if not grid:
        raise UsageError(
            f"--context {lineup.context}: even a quarter of it is beyond the {lineup.limit} tokens "
            "that the config allows; give a shorter --context, or --lengths"
        )
    if lineup.most and grid[-1] > lineup.most:
        raise UsageError(
            f"--lengths {length_text(grid[-1])}: one of the models reads {lineup.most:,} tokens "
            "and no more (its position table or max_seq_len ends); extend further, or give "
            f"{words.shorter}"
        )
    if options.data is not None:
        wanted = Wanted(grid, bool(options.lengths), options.max_docs)
        corpus = read_corpus(options, encoder, wanted, words)
        if stops:
            _check_target(lineup, corpus, grid)
        warnings += unread_files(source_of(options, words))
        warnings += _corpus_warnings(corpus, grid, options.split_documents)
        if unknown := encoder.unknown(corpus.documents):
            warnings.append(unknown)
        grid = corpus.lengths
    beyond = [length for length in grid if length > lineup.limit]
    if beyond:
        warnings.append(
            f"[beyond-config] {length_text(beyond[0])} is beyond the {length_text(lineup.limit)} "
            "tokens that the config was made for; `ropext extend` of the base makes a checkpoint "
            "that reads it"
        )
    return corpus, grid, warnings


def _check_target(lineup: Lineup, corpus: Corpus, grid: Sequence[int]) -> None:
    """Raise InputError if too few documents reach the target of an extension, so that it would be
    left out."""
    target = lineup.limit
    extended = any(variant.kind == EXTENDED for variant in lineup.variants)
    if not extended or corpus.lengths[-1] >= target or target not in corpus.reaching:
        return
    count = corpus.reaching[target]
    reaching = f"{count} of {corpus.num_read} documents reach"
    if count:
        lengths = lengths_text(grid).replace(" ", "")
        remedy = f"--lengths {lengths} reads those alone, with numbers but no intervals"
    else:
        lengths = lengths_text(corpus.lengths).replace(" ", "")
        remedy = f"--lengths {lengths} reads no further than they reach"
    raise InputError(
        f"{reaching} the target of {length_text(target)} tokens, and an interval takes "
        f"{FEWEST_DOCUMENTS}: give longer documents; {remedy}"
    )


def source_of(options: Measuring, words: DocumentWords = AS_EVAL) -> Source:
    """Return the source of the documents, for an evaluation, for a choice of methods or for a
    server."""
    return Source(
        options.data or "",
        column=options.column,
        split=options.split,
        revision=options.data_revision,
        largest=options.max_document_mib,
        pieces=options.split_documents,
        flag=words.data,
    )


def read_corpus(
    options: Measuring, encoder: DocumentEncoder, wanted: Wanted, words: DocumentWords = AS_EVAL
) -> Corpus:
    """Read the documents that the options name into a corpus; raise InputError if none is long
    enough."""
    source = source_of(options, words)
    wanted = replace(wanted, streamed=source.is_streamed, shorter=words.shorter)
    longest = wanted.lengths[-1]
    return choose_documents(texts_of(source, encoder, longest), encoder, wanted)


def _corpus_warnings(corpus: Corpus, grid: Sequence[int], split: str | None) -> list[str]:
    """Return warnings about documents and lengths that were left out, and about missing or weak
    intervals."""
    lines = []
    if corpus.num_read == 1:
        lines.append(
            "[one-document] one document is read, of which the first "
            f"{length_text(corpus.lengths[-1])} tokens are read; {REMEDY}"
        )
    if split == WINDOWS:
        lines.append(
            "[windows] documents were cut into windows (--split-documents): intervals are over "
            "windows, and those of one text are more alike than documents are"
        )
    cut = [length for length in grid if length not in corpus.lengths]
    if cut:
        counts = ", ".join(
            f"{corpus.reaching[length]} reach {length_text(length)}" for length in cut
        )
        lines.append(
            f"[left-out] lengths {lengths_text(cut)} are left out: of {corpus.num_read} documents "
            f"{counts}; an interval takes {FEWEST_DOCUMENTS} (--lengths asks for them all the same)"
        )
    if corpus.num_short:
        lines.append(
            f"[left-out] {corpus.num_short} of {corpus.num_read} documents are shorter than "
            f"{length_text(corpus.lengths[-1])} tokens and are not read"
        )
    count = len(corpus.documents)
    if count < FEWEST_DOCUMENTS:
        few = f"{count} documents give ranges instead of intervals"
        if count == 1:
            few = "one document gives no interval"
        lines.append(
            f"[few-documents] {few}, and no verdict ({FEWEST_DOCUMENTS} or more give both)"
        )
    return lines


def build_questions(
    options: Evaluate,
    context: int,
    lengths: Sequence[int],
    encoder: DocumentEncoder,
    corpus: Corpus | None,
) -> tuple[tuple[tuple[Item, ...], ...], list[str]]:
    """Return the groups of questions, and warnings about questions that are left out."""
    names = [name for name in options.tasks if not isinstance(name, OwnTask)]
    groups, left_out = _bundled_questions(options, names, lengths, encoder, corpus)
    for task in options.tasks:
        if isinstance(task, OwnTask):
            questions = read_questions(task, context, lengths, options.seed)
            items, warnings = own_items(task, questions, encoder, lengths, options.seed)
            groups += items
            left_out += warnings
    return tuple(groups), left_out


def _bundled_questions(
    options: Evaluate,
    names: Sequence[str],
    lengths: Sequence[int],
    encoder: DocumentEncoder,
    corpus: Corpus | None,
) -> tuple[list[tuple[Item, ...]], list[str]]:
    """Return the questions of ropext's tasks, and warnings about lengths that are too short for a
    task.

    A length that the user gave is never left out: if items do not fit, raise the error of the task
    that needs most.
    """
    if not names:
        return [], []
    tokens = len(names) * options.items * len(options.depths) * sum(lengths)
    check_amount(tokens, "give fewer --items or --depths, or shorter --lengths")
    around = _haystack_named(options.haystack, encoder, corpus)
    before = 0 if encoder.bos is None else 1  # the BOS in front of a prompt
    groups = list[tuple[Item, ...]]()
    left_out = dict[str, UsageError]()
    known = read_passages(options.passages) if options.passages else ()
    for name in names:
        task = find_task(name)
        task = passages.over_passages(task, known) if known else task
        for length in lengths:
            try:
                for index, depths in task.groups(options.depths, options.items):
                    items = task.build(
                        encoder,
                        around,
                        length=length - before,
                        depths=depths,
                        index=index,
                        seed=options.seed,
                    )
                    groups.append(tuple(items))
            except UsageError as error:
                if options.lengths and not isinstance(error, LengthTooShort):
                    raise
                left_out[f"[left-out] {name} is left out at {length_text(length)}: {error}"] = error
    if left_out and (options.lengths or not groups):
        raise max(left_out.values(), key=lambda error: getattr(error, "needed", 0))
    return groups, list(left_out)


def read_passages(path: str) -> tuple[KnownAnswer, ...]:
    """Read the questions and passages that models read in a measurement (--passages) from a JSONL
    file: {"question": TEXT, "answers": [TEXT, ...], "passages": [...]}."""
    if not Path(path).is_file():
        raise InputError(f"--passages {path} is no file")
    known = list[KnownAnswer]()
    for where, row in json_lines(Path(path)):
        question = row.get("question")
        answers = row.get("answers")
        texts = row.get("passages")
        if (
            not _is_nonempty_text(question)
            or not _are_nonempty_texts(answers)
            or not _are_nonempty_texts(texts)
        ):
            raise InputError(
                f"--passages {where}: not a JSON object with a question, a list of answers and a "
                "list of passages, none of them empty"
            )
        known.append(KnownAnswer(question, tuple(answers), tuple(texts)))
    if not known:
        raise InputError(f"--passages {path} is empty")
    return tuple(known)


def _is_nonempty_text(value: object) -> TypeGuard[str]:
    """Return whether a value in the file of passages that a measurement reads (--passages) is a
    text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


def _are_nonempty_texts(value: object) -> TypeGuard[list[str]]:
    """Return whether a value in the file of passages that a measurement reads (--passages) is a
    list of one text or more, none of them blank."""
    return (
        isinstance(value, list) and bool(value) and all(_is_nonempty_text(text) for text in value)
    )


def _haystack_named(name: str, encoder: DocumentEncoder, corpus: Corpus | None) -> Haystack:
    """Return the haystack that --haystack names: it gives the tokens around the needles of a
    question."""
    if name == "repeat":
        return repetition(encoder)
    if name == "noise":
        return noise(encoder)
    assert corpus is not None  # if a haystack is text, Evaluate requires --data
    texts = [document.ids[int(document.has_bos) :] for document in corpus.documents]
    return running_text([int(token) for text in texts for token in text])
