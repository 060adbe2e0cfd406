"""What is read, decided before any weight is loaded: documents and questions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ropext.checkpoint import provenance
from ropext.checkpoint.digests import Digests
from ropext.corpus import (
    Corpus,
    DocumentEncoder,
    Source,
    Wanted,
    choose_documents,
    read_documents,
    split_documents,
    unread_files,
)
from ropext.corpus.selection import REMEDY, WINDOWS
from ropext.errors import InputError, UsageError
from ropext.evaluation import harness
from ropext.evaluation.reading import Masking
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Lineup, line_up, trained_on
from ropext.inputs import CONFIG_LIMIT, read_bytes
from ropext.lengths import doubling_grid, length_text, lengths_text, tail_tokens
from ropext.models.load import silenced
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import Show, unseen
from ropext.options.evaluate import Evaluate
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.results import EXTENDED, SCHEMA
from ropext.results.gates import Gate, Metrics, split_spec
from ropext.results.overlap import Overlap, overlap
from ropext.results.perplexity import MASK_STRIDE, PROTOCOLS, SHORT_WINDOW, Frame, Protocol
from ropext.results.rundir import read_run
from ropext.results.values import FEWEST_DOCUMENTS, Bootstrap
from ropext.tasks import (
    Haystack,
    Item,
    check_amount,
    find_task,
    noise,
    passages,
    repetition,
    running_text,
)
from ropext.tasks.item import TooShort
from ropext.tasks.passages import KnownAnswer
from ropext.workdir import Workdir

LIBRARIES = ("ropext", "torch", "transformers", "tokenizers", "peft", "numpy")
# What decides the losses and answers of a variant, besides the document or the question.
OF_EVERY_UNIT = (
    "schema",
    "masking",
    "context",
    "tokenizer_sha256",
    "bos",
    "short_window",
    "versions",
)


@dataclass(frozen=True)
class Evaluation:
    """Everything that is decided before weights are loaded: models, documents, questions."""

    options: Evaluate
    lineup: Lineup
    encoder: DocumentEncoder
    trust_remote_code: bool
    corpus: Corpus | None
    reads: Reads
    protocol: Protocol
    warnings: tuple[str, ...]
    overlaps: Mapping[str, Overlap]  # of the variants that were trained, by label

    @property
    def frame(self) -> Frame:
        return self.reads.frame

    def workdir(self, output: Path, command: Sequence[str] = (), show: Show = unseen) -> Workdir:
        """Where it is kept, and what exactly is run: what must be equal for it to go on there.
        Weights that are not remembered are read for it, which is shown."""
        lineup = self.lineup
        options = self.options
        reads = self.reads
        items = [asdict(item) for group in reads.questions for item in group]
        tokenizer = self.encoder.tokenizer
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        template = str(getattr(tokenizer, "chat_template", None))
        decides = {
            "schema": SCHEMA,
            "protocol": self.protocol.name,
            "protocol_text": self.protocol.text,
            "settings": options.deciding(NUMBERS),
            "context": lineup.context,
            "lengths": list(self.frame.lengths),
            "variants": lineup.contents(Digests(show), self.trust_remote_code),
            "tokens_sha256": list(reads.hashes),
            "questions_sha256": provenance.digest(items),
            "tokenizer_sha256": provenance.digest([vocabulary, template]),
            "bos": reads.bos,
            "short_window": SHORT_WINDOW,
            "versions": provenance.installed(LIBRARIES),
        }
        if reads.masking:
            decides["masking"] = asdict(reads.masking)
        about = {
            "words": list(provenance.clean_command(command)),
            "names": options.deciding(CONTENT, NEUTRAL)
            | {"models": {variant.label: variant.snapshot.name for variant in lineup.variants}},
        }
        return Workdir(output, "eval", decides, about)

    def stores(self, place: Workdir) -> dict[str, str]:
        """Name the folder of each variant's readings, by its label: it holds what this very model
        reads in this manner, whichever run read it. Documents and questions name the files."""
        rest = {key: value for key, value in place.decides.items() if key in OF_EVERY_UNIT}
        rest |= {key: place.decides["settings"][key] for key in ("dtype", "attn_implementation")}
        if "masking" in rest:
            rest["lengths"] = place.decides["lengths"]  # the shortest bounds the tail
        contents = place.decides["variants"]
        names = {}
        for variant in self.lineup.variants:
            key = provenance.digest([contents[variant.label], variant.config, rest])
            names[variant.label] = f"{variant.label}-{key[:16]}"
        return names


def prepare(
    model: str,
    revision: str | None,
    trust_remote_code: bool,
    values: Mapping[str, Any],
    lineup: Lineup | None = None,
    gates: Sequence[Gate] = (),
) -> Evaluation:
    """Choose models, lengths, documents and questions; gates about anything else are refused."""
    options = Evaluate(**values)
    if options.lm_eval:
        harness.check(options.lm_eval)
    not_given = lineup is None
    lineup = lineup or line_up(model, revision, options)
    with silenced():
        tokenizer = load_tokenizer(lineup.variants[-1].snapshot, trust_remote_code)
    config = lineup.variants[-1].snapshot.config
    vocabulary = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    encoder = DocumentEncoder(tokenizer, vocabulary, options.seed, options.chat)
    encoder.template_args = options.template_args
    masking = _masking(options, lineup, encoder) if lineup.masked else None
    corpus, grid, warnings = _corpus(lineup, options, encoder, stops=not_given)
    overlaps = overlaps_of(lineup, corpus, options.haystack == "text")
    questions, left_out = _questions(options, grid, encoder, corpus)
    labels = [variant.label for variant in lineup.variants]
    Metrics(options, labels, grid, lineup.masked).check(gates)
    for other in {gate.run for gate in gates if gate.run is not None} - {*labels}:
        read_run(split_spec(other)[0])  # one that is not there, or not whole, is refused
    tail = tail_tokens(lineup.context)
    stride = 0
    if masking is not None:
        # Every length scores the same tokens, in one piece, for all tokens see one another.
        tail = min(tail, masking.text_in(grid[0]))
        stride = MASK_STRIDE
        options = options.model_copy(update={"chunk": grid[-1]})
    return Evaluation(
        options,
        lineup,
        encoder,
        trust_remote_code,
        corpus,
        Reads(
            Frame(lineup.context, grid, tail, Bootstrap(options.seed), stride),
            corpus.documents if corpus else (),
            questions,
            masking,
            encoder.bos,
            encoder.decode,
            is_strided=options.protocol == "hf-stride",
        ),
        PROTOCOLS["pseudo-perplexity" if masking else options.protocol],
        (*lineup.warnings, *warnings, *_overlap_warnings(overlaps), *left_out),
        overlaps,
    )


def _masking(options: Evaluate, lineup: Lineup, encoder: DocumentEncoder) -> Masking:
    """What masked language models are read with; options of causal ones are refused."""
    name = lineup.variants[-1].snapshot.name
    protocol = options.protocol != "ropext"
    unfit = {"--tasks": options.tasks, "--lm-eval": options.lm_eval, "--chunk": options.chunk}
    for flag in [name for name, given in (unfit | {"--protocol": protocol}).items() if given]:
        raise UsageError(
            f"{flag} is for models that predict the next token, and {name} fills in masked ones: "
            "--data TEXTS alone measures its pseudo-perplexity"
        )
    return masking_of(encoder, name)


def masking_of(encoder: DocumentEncoder, name: str) -> Masking:
    """What a masked language model is read with; documents are then text alone."""
    if (token := encoder.tokenizer.mask_token_id) is None:
        raise InputError(f"the tokenizer of {name} has no mask token")
    encoder.bos = None  # every window has its own
    return Masking(int(token), *encoder.around())


def _corpus(
    lineup: Lineup, options: Evaluate, encoder: DocumentEncoder, *, stops: bool
) -> tuple[Corpus | None, tuple[int, ...], list[str]]:
    """The documents, the lengths at which they are read, and what must be said of either; `stops`
    where too few documents reach the target of an extension: it is what one asks about."""
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
            "and no more (its position table or max_seq_len ends); extend further, or give shorter "
            "--lengths"
        )
    if options.data is not None:
        wanted = Wanted(grid, bool(options.lengths), options.max_docs)
        corpus = read_corpus(options, encoder, wanted)
        if stops:
            _check_target(lineup, corpus, grid)
        warnings += unread_files(source_of(options))
        warnings += _corpus_warnings(corpus, grid, options.split_documents)
        grid = corpus.lengths
    beyond = [length for length in grid if length > lineup.limit][:1]
    warnings += [
        f"[beyond-config] {length_text(length)} is beyond the {length_text(lineup.limit)} tokens "
        "that the config was made for; `ropext extend` of the base makes a checkpoint that reads it"
        for length in beyond
    ]
    return corpus, grid, warnings


def _check_target(lineup: Lineup, corpus: Corpus, grid: Sequence[int]) -> None:
    """Refuse to leave the target of an extension out without a word from the user."""
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


def source_of(options: Evaluate) -> Source:
    """Where the documents come from."""
    return Source(
        options.data or "",
        options.column,
        options.split,
        options.data_revision,
        options.max_document_mib,
    )


def read_corpus(options: Evaluate, encoder: DocumentEncoder, wanted: Wanted) -> Corpus:
    """Read the documents that the options name; InputError where none is long enough."""
    source = source_of(options)
    wanted = replace(wanted, streamed=source.is_streamed)
    longest = wanted.lengths[-1]
    raw = split_documents(read_documents(source), options.split_documents, encoder, longest)
    return choose_documents(raw, encoder, wanted)


def overlaps_of(lineup: Lineup, corpus: Corpus | None, questions: bool) -> dict[str, Overlap]:
    """What each variant that was trained was trained on of the documents that are read; `questions`
    where these are asked about them."""
    read = [document.known_by for document in corpus.documents] if corpus else []
    pairs = ((variant.label, overlap(trained_on(variant), read)) for variant in lineup.variants)
    return {label: replace(it, questions=questions) for label, it in pairs if it is not None}


def _overlap_warnings(overlaps: Mapping[str, Overlap]) -> list[str]:
    by_sentence: dict[str, list[str]] = {}
    for label, each in overlaps.items():
        if each.sentence:
            by_sentence.setdefault(each.sentence, []).append(label)
    return [f"[seen] {', '.join(labels)}: {sentence}" for sentence, labels in by_sentence.items()]


def _corpus_warnings(corpus: Corpus, grid: Sequence[int], split: str | None) -> list[str]:
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
    cut = tuple(length for length in grid if length not in corpus.lengths)
    if cut:
        lines.append(
            f"[left-out] lengths {lengths_text(cut)} are left out: of {corpus.num_read} documents "
            + ", ".join(f"{corpus.reaching[length]} reach {length_text(length)}" for length in cut)
            + f"; an interval takes {FEWEST_DOCUMENTS} (--lengths asks for them all the same)"
        )
    if corpus.num_short:
        lines.append(
            f"[left-out] {corpus.num_short} of {corpus.num_read} documents are shorter than "
            f"{length_text(corpus.lengths[-1])} tokens and are not read"
        )
    if (count := len(corpus.documents)) < FEWEST_DOCUMENTS:
        few = f"{count} documents give ranges in place of intervals"
        few = few if count > 1 else "one document gives no interval"
        lines.append(
            f"[few-documents] {few}, and no verdict ({FEWEST_DOCUMENTS} or more give both)"
        )
    return lines


def _questions(
    options: Evaluate, lengths: Sequence[int], encoder: DocumentEncoder, corpus: Corpus | None
) -> tuple[tuple[tuple[Item, ...], ...], list[str]]:
    """The question groups, and which lengths are too short for a task.

    A length that the user asked for is never left out: an item that does not fit is an error, that
    of the task which needs most.
    """
    if not options.tasks:
        return (), []
    tokens = len(options.tasks) * options.items * len(options.depths) * sum(lengths)
    check_amount(tokens, "give fewer --items or --depths, or shorter --lengths")
    around = _haystack(options.haystack, encoder, corpus)
    extra = 0 if encoder.bos is None else 1
    groups = list[tuple[Item, ...]]()
    left_out = dict[str, UsageError]()
    known = read_passages(options.passages) if options.passages else ()
    for name in options.tasks:
        task = find_task(name)
        task = passages.over(task, known) if known else task
        for length in lengths:
            try:
                for index, depths in task.groups(options.depths, options.items):
                    items = task.build(
                        encoder,
                        around,
                        length=length - extra,
                        depths=depths,
                        index=index,
                        seed=options.seed,
                    )
                    groups.append(tuple(items))
            except UsageError as error:
                if options.lengths and not isinstance(error, TooShort):
                    raise
                left_out[f"[left-out] {name} is left out at {length_text(length)}: {error}"] = error
    if left_out and (options.lengths or not groups):
        raise max(left_out.values(), key=lambda error: getattr(error, "needed", 0))
    return tuple(groups), [*left_out]


def read_passages(path: str) -> tuple[KnownAnswer, ...]:
    """Questions of a JSONL file: {"question": TEXT, "answers": [TEXT, ...], "passages": [...]}."""
    lines = read_bytes(Path(path), CONFIG_LIMIT).splitlines() if Path(path).is_file() else None
    if lines is None:
        raise InputError(f"--passages {path} is no file")
    known = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            texts = row["question"], *row["answers"], *row["passages"]
            sound = row["answers"] and row["passages"] and all(text.strip() for text in texts)
        except (ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound or isinstance(row["answers"], str) or isinstance(row["passages"], str):
            raise InputError(
                f"--passages {path}, line {number}: not a JSON object with a question, a list of "
                "answers and a list of passages, none of them empty"
            )
        known.append(KnownAnswer(row["question"], tuple(row["answers"]), tuple(row["passages"])))
    if not known:
        raise InputError(f"--passages {path} is empty")
    return tuple(known)


def _haystack(name: str, encoder: DocumentEncoder, corpus: Corpus | None) -> Haystack:
    if name == "repeat":
        return repetition(encoder)
    if name == "noise":
        return noise(encoder)
    assert corpus is not None  # where a haystack is of text, Evaluate asks for --data
    texts = [document.ids[int(document.has_bos) :] for document in corpus.documents]
    return running_text([int(token) for text in texts for token in text])
