"""`--method auto`: which method, found by measurement within a budget, before the run of a recipe
begins.

OUT.run/choice/
  choosing.jsonl, verdict.jsonl   the documents, divided by their content
  readings/                       what was read, so that an interrupted choice goes on
  choice.json                     what was tried and left out, what was taken and why
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from ropext import corpus
from ropext.atomic import write_text
from ropext.checkpoint import Snapshot, open_snapshot, provenance, with_weights
from ropext.checkpoint.staging import check_output
from ropext.corpus import Document, DocumentEncoder, RawDocument
from ropext.corpus.selection import MOST_TOKENS, NO_LIMIT
from ropext.errors import InputError, RopextError, UsageError
from ropext.evaluation.documents import read_corpus
from ropext.evaluation.forward import NanInLogits
from ropext.evaluation.ranking import closed_forms, frame_of, preference, readable, rivals
from ropext.evaluation.reader import Progress, Reader
from ropext.evaluation.reads import Reads
from ropext.evaluation.variants import Variant, applied
from ropext.inputs import read_text
from ropext.jsontext import read_json, write_json
from ropext.lengths import length_text
from ropext.models.load import load_model, loading_of, silenced
from ropext.models.memory import memory_errors, out_of_memory
from ropext.models.processes import rank_and_count
from ropext.models.tokenizer import load_tokenizer
from ropext.narration import NOBODY, Call, told_of_files
from ropext.options.evaluate import DEPTHS, Evaluate
from ropext.options.extend import TRAINED_COST, Writing, parse_budget, parse_extend
from ropext.options.fields import EVALUATE, EXTEND, FINETUNE, FIT, NUMBERS
from ropext.options.recipe import Recipe
from ropext.pipeline.extending import write_extension
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.job import check_data, gates_of
from ropext.pipeline.steps import LABELS, READ_ALWAYS, USED, section_key
from ropext.planning import Plan, make_plan
from ropext.results import CONTROL, EXTENDED, UNTOUCHED
from ropext.results.gates import Metrics
from ropext.results.measurement import Measurement, Store
from ropext.results.overlap import NO_DOCUMENTS, Trained, trained
from ropext.results.perplexity import Frame
from ropext.results.rules import (
    ROUNDS,
    Standing,
    because,
    in_memory,
    lost,
    standing,
    tail_above,
)
from ropext.results.values import FEWEST_DOCUMENTS
from ropext.results.windows import forward_tokens, short_windows
from ropext.tasks import Item, find_task, repetition
from ropext.workdir import Ledger, Step, Workdir, once, remove

# Of the documents that reach the target a third gives the verdict: eight, if there are as many
# again, and no more than this.
VERDICT = 32
# Questions that decide between those whose loss is the same, and between how many at the most.
QUESTIONS = 16
FINALISTS = 3
TASK = "passkey"
PLACES = DEPTHS[:4]
# Closed forms from which a fit is tried.
STARTS = 3
# The divided documents are plain: what it took to read the user's is not asked again.
STAYS = ("method", "theta", "even_so")  # options that leave a model as it is: its own theta
PLAIN: dict[str, Any] = dict.fromkeys(("column", "split", "split_documents", "data_revision"))

Coded = tuple[RawDocument, Document]


@dataclass(frozen=True)
class Prospect:
    """What a choice would try, known before a weight is read."""

    recipe: Recipe
    snapshot: Snapshot
    plans: dict[str, Plan]  # the model untouched, where that can be written, and the closed forms
    left_out: dict[str, str]
    beside: list[Variant]  # what no checkpoint says; without a budget they are read too
    reading: Evaluate
    encoder: DocumentEncoder
    to_choose: list[RawDocument]
    to_judge: list[Coded]  # none where the recipe names other documents for the verdict
    able: int  # of those that choose, how many reach the target
    frame: Frame

    @property
    def target(self) -> int:
        return self.frame.longest

    @property
    def documents(self) -> int:
        """How many a form is read on at the most."""
        return min(self.able, self.reading.max_docs)

    @property
    def verdict(self) -> int:
        """Forward tokens of the evaluation at the end: the base, it untouched, the extension, and
        what was fitted or trained."""
        documents = len(self.to_judge) or self.documents
        models = 3 + (self.recipe.finetune is not None)
        base = forward_tokens(short_windows(self.target, self.frame.context))
        passes = documents * (models * self.target + base)
        return passes + models * QUESTIONS * self.target

    @property
    def least(self) -> int:
        """Forward tokens without which nothing is decided: of the first comparison, and the
        verdict's."""
        return min(ROUNDS[0], self.documents) * len(self.plans) * self.target + self.verdict

    def check_budget(self, tokens: int) -> None:
        if tokens < self.least:
            raise UsageError(
                f"--budget {self.recipe.extend.budget} is {tokens:,} tokens; to compare "
                f"{len(self.plans)} methods and reach a verdict takes {self.least:,}, so give at "
                "least that"
            )

    def check_gates(self) -> None:
        """A gate about what the verdict will not measure is told before anything is read."""
        options = Evaluate(**vars(self.reading) | {"tasks": (TASK,)} | self.recipe.evaluation)
        labels = (*READ_ALWAYS, *LABELS.values(), CONTROL)
        gates = [gate for gate in gates_of(self.recipe) if gate.run is None]
        with self.recipe.told(EVALUATE):
            Metrics(options, labels, options.lengths or (self.target,)).check(gates)

    def to_json(self) -> dict[str, Any]:
        """What --dry-run tells."""
        budget = self.recipe.extend.budget
        forms = [*self.plans, *(variant.label for variant in self.beside if budget is None)]
        tokens = len(forms) * self.target
        count = len(self.to_judge)
        first = min(ROUNDS[0], self.documents) * tokens
        most = self.documents * tokens
        stages = {
            "choose": f"{', '.join(forms)}: {first:,} to {most:,} tokens, on {self.documents} "
            "documents",
            FIT: "from the closed form that is taken, if it can be written and the budget holds it",
            EVALUATE: f"about {self.verdict:,} tokens, on "
            + (f"{count} documents that take no part in choosing" if count else "evaluate.data"),
        }
        return {"stages": stages, "left_out": self.left_out, "budget": budget, "least": self.least}


def prospect(recipe: Recipe, call: Call) -> Prospect:
    """Read the config and the documents; whatever a choice would refuse is refused."""
    snapshot = open_snapshot(recipe.model, revision=recipe.revision)
    request = parse_extend(recipe.request, read_text)
    closed, left_out = closed_forms(snapshot, request, recipe.model)
    example = next(iter(closed.values()))
    if example.model.masked_lm:
        raise UsageError("--method auto measures causal language models; name a method")
    example.require_help()
    stays = dict(zip(STAYS, ("abf", example.main.rope.theta, True), strict=True))
    try:
        plans = {UNTOUCHED: make_plan(snapshot.config, request.changed(**stays), recipe.model)}
    except RopextError:
        plans = {}  # a temperature was asked for, or this family's spectrum is no theta's
    place = str(recipe.extend.data)
    reading = Evaluate(**recipe.evaluation | {"data": place, "lengths": (example.target,)})
    with silenced():
        tokenizer = load_tokenizer(snapshot, call.trust_remote_code)
    encoder = DocumentEncoder(tokenizer, example.model.vocab_size, reading.seed)
    able, short = _documents(reading, encoder, example.target)
    elsewhere = bool(recipe.evaluate and recipe.evaluate.data)
    judged, chosen = (list[Coded](), able) if elsewhere else _divided(able, short, example.target)
    if not chosen or not (judged or elsewhere):
        raise InputError(
            f"--data {place}: {len(able) or 'none'} of its documents reaches "
            f"{length_text(example.target)} tokens; two without common text are needed, one to "
            "choose by and one for the verdict (eight of each give intervals). Give more or longer "
            "documents, a smaller --factor, or evaluate.split_documents=windows"
        )
    made = Prospect(
        recipe=recipe,
        snapshot=snapshot,
        plans=plans | closed,
        left_out=left_out,
        beside=rivals(snapshot, request),
        reading=reading,
        encoder=encoder,
        to_choose=[document for document, _ in (*chosen, *short)],
        to_judge=judged,
        able=len(chosen),
        frame=frame_of(example.context, example.target, reading.seed),
    )
    made.check_gates()
    budget = recipe.extend.budget
    if budget and not parse_budget(budget).is_time:
        made.check_budget(int(parse_budget(budget).amount))
    return made


def _documents(
    options: Evaluate, encoder: DocumentEncoder, target: int
) -> tuple[list[Coded], list[Coded]]:
    """Those that reach the target, by keys that their content and the seed decide, and the others,
    which can be trained on."""
    where = options.column, options.split, options.data_revision, options.max_document_mib
    source = corpus.Source(str(options.data), *where)
    raw = corpus.read_documents(source)
    raw = corpus.split_documents(raw, options.split_documents, encoder, target)
    basket = corpus.Basket[Coded](MOST_TOKENS)
    key_of = partial(encoder.content_key, use="choice")
    for key, text, document in corpus.DistinctTexts(raw, encoder, key_of):
        if not basket.admits(key):
            continue
        coded = encoder.document(document.name, text, NO_LIMIT)
        basket.add(key, (document, coded), max(1, len(coded)))
        if source.is_streamed and basket.tokens >= MOST_TOKENS:
            break
    pairs = basket.in_order()
    able = [(document, coded) for document, coded in pairs if len(coded) >= target]
    return able, [(document, coded) for document, coded in pairs if len(coded) < target]


def _divided(
    able: Sequence[Coded], short: Sequence[Coded], target: int
) -> tuple[list[Coded], list[Coded]]:
    """Those of the verdict, and those that choose. One that has parts in common with what a fit may
    read chooses too, and the next takes its place."""
    share = min(len(able) // 2, max(FEWEST_DOCUMENTS, len(able) // 3), VERDICT)
    judged = list(able[:share])
    queue = list(able[share:])
    chosen = list[Coded]()
    shared = [True]
    while any(shared):
        known = trained(coded.known_by[1:] for _, coded in (*chosen, *queue, *short))
        # As they will be read, by their beginnings.
        shared = [known.holds(*coded.cut(target).known_by[1:]) for _, coded in judged]
        chosen += compress(judged, shared)
        judged = [*compress(judged, map(not_, shared)), *queue[: sum(shared)]]
        queue = queue[sum(shared) :]
    return judged, [*chosen, *queue]


def choose(recipe: Recipe, output: Path, call: Call) -> Recipe:
    """The recipe with the method that measurement took and the stages that follow; a choice that
    was made before with all the same is not made again."""
    if rank_and_count()[1] > 1:
        raise UsageError(
            "--method auto runs in one process: run it without accelerate launch, then launch the "
            "recipe with the method that it chose"
        )
    check_data(recipe)
    hooks = call.hooks
    words = {"words": list(provenance.clean_command(call.command))} if call.command else {}
    place = Workdir(output, "run", {}, words)
    folder = place.folder / "choice"
    ledger = Ledger(place.folder / "stages", provenance.versions())
    hashes = Hashes(told_of_files(hooks.say))
    path = folder / "choice.json"
    step = Step(
        "choose",
        1,
        partial(_inputs, recipe, hashes),
        lambda: {"choice": hashes.of(path)} if path.is_file() else None,
        lambda: write_json(path, AutoChoice(beforehand, folder, call).made()),
        partial(remove, folder),
    )
    if ledger.left(step) is None:
        if ledger.read(step.name) is None:  # later the run knows what it has written itself
            check_output(output, force=call.force, inputs=[])
        beforehand = prospect(recipe, call)
        with place.claimed(call.force):
            once(ledger, step)
    else:
        hooks.say("choose: done before, skipped")
    return recipe.chosen(read_json(path))


def _inputs(recipe: Recipe, hashes: Hashes) -> dict[str, Any]:
    """What decides a choice."""
    snapshot = with_weights(open_snapshot(recipe.model, revision=recipe.revision))
    decides = {"base": hashes.of_model(snapshot)}
    decides |= section_key(EXTEND, recipe.extend, hashes, NUMBERS)
    for name in (FIT, FINETUNE, EVALUATE):
        decides |= section_key(name, getattr(recipe, name), hashes)
    return decides


@dataclass
class AutoChoice:
    """A choice at work."""

    prospect: Prospect
    folder: Path
    call: Call
    spent: int = 0  # tokens read forward
    budget: int | None = None  # the same
    rounds: list[Standing] = field(default_factory=list)
    chose: Trained = NO_DOCUMENTS

    def __post_init__(self) -> None:
        plans = self.prospect.plans
        snapshot = self.prospect.snapshot
        self.hooks = self.call.hooks
        self.left_out = self.prospect.left_out
        self.variants = {
            label: Variant(label, EXTENDED, snapshot, plan.config) for label, plan in plans.items()
        }
        self.variants |= {variant.label: variant for variant in self.prospect.beside}
        self.in_memory = list[str]()
        self.stores = {label: Store(self.folder / "readings" / label) for label in self.variants}

    def made(self) -> dict[str, Any]:
        """Measure, and tell what came of it."""
        prospect = self.prospect
        to_judge = [raw for raw, _ in prospect.to_judge]
        for name, documents in (("choosing", prospect.to_choose), ("verdict", to_judge)):
            key = ["messages", "text"]
            rows = [json.dumps({key[isinstance(d.content, str)]: d.content}) for d in documents]
            write_text(self.folder / f"{name}.jsonl", "\n".join(rows) + "\n")
        self.hooks.say(
            f"choosing among {', '.join(prospect.plans)} at {length_text(prospect.target)} on up "
            f"to {prospect.documents} documents"
        )
        if prospect.documents < FEWEST_DOCUMENTS:
            self.hooks.say(
                f"warning: [few-documents] only {prospect.documents} documents to choose by: "
                "nothing is sure (eight or more give intervals), and the lowest is taken as it "
                "stands"
            )
        said = out_of_memory(prospect.recipe.model, "what was read is kept")
        with silenced(), memory_errors(said):
            method, why = self._measure()
        recipe = {f"{EXTEND}.method": method} | self._fitting(method) | self._judging()
        if method == UNTOUCHED:
            stays = prospect.plans[UNTOUCHED].recipe
            recipe |= {f"{EXTEND}.{key}": getattr(stays, key) for key in STAYS}
        judged = trained(coded.cut(prospect.target).known_by[1:] for _, coded in prospect.to_judge)
        used = replace(NO_DOCUMENTS, chose=self.chose, judged=judged)
        self._afford_tuning(method)
        self.hooks.say(f"choose: {method}: {why}")
        for sentence in self.in_memory:
            self.hooks.say(f"choose: {sentence}")
        for name, reason in self.left_out.items():
            self.hooks.say(f"left out: {name}: {reason}")
        return {
            "taken": method,
            "because": why,
            "target": prospect.target,
            "documents": prospect.able,
            "verdict_documents": len(prospect.to_judge),
            USED: used.to_json(),
            "in_memory": self.in_memory,
            "rounds": [ranking.to_json() for ranking in self.rounds],
            "left_out": self.left_out,
            "forward_tokens": self.spent,
            "budget": prospect.recipe.extend.budget,
            "budget_tokens": self.budget,
            "recipe": recipe,
        }

    def _measure(self) -> tuple[str, str]:
        """The rounds, then questions among those that are equally good: who is taken, and why."""
        prospect = self.prospect
        trusted = self.call.trust_remote_code
        files = prospect.reading.changed(data=str(self.folder / "choosing.jsonl"), **PLAIN)
        wanted = corpus.Wanted((prospect.target,), True, files.max_docs)
        documents = read_corpus(files, prospect.encoder, wanted).documents
        self.chose = trained(document.known_by[1:] for document in documents)
        model = load_model(with_weights(prospect.snapshot), loading_of(files, trusted))
        reader = Reader(partial(applied, model), files)
        reads = Reads(prospect.frame, documents)
        self._set_budget(reader, reads)
        self._rounds(reader, reads, list(prospect.plans))
        last = self.rounds[-1]
        out = self._forgetful(reader, last.alike[:FINALISTS])
        remembering = [label for label in last.alike if label not in out]
        method = last.take(remembering, [UNTOUCHED, *preference(prospect.plans)])
        if self.budget is None:
            self._read_beside(reader, reads.of(0, last.documents), last.lowest)
        return method, because(last, method)

    def _set_budget(self, reader: Reader, reads: Reads) -> None:
        """In tokens; a time by how long one document takes, once."""
        prospect = self.prospect
        text = self.prospect.recipe.extend.budget
        if text is None:
            return
        budget = parse_budget(text)
        note = self.folder / "budget.json"
        if not note.is_file():
            tokens = budget.amount
            if budget.is_time:
                begun = time.monotonic()
                label, first = next(iter(self.variants.items()))
                reader.measure([first], reads.of(0, 1), {label: Store()}, Progress())
                tokens *= prospect.target / (time.monotonic() - begun)
            write_json(note, {"tokens": int(tokens)})
        self.budget = int(read_json(note)["tokens"])
        prospect.check_budget(self.budget)

    def _may_spend(self, tokens: int) -> bool:
        reserved = self.spent + self.prospect.verdict
        return self.budget is None or reserved + tokens <= self.budget

    def _rounds(self, reader: Reader, reads: Reads, labels: list[str]) -> None:
        """Read more and more documents by fewer and fewer forms."""
        count = len(reads.documents)
        ends = [end for end in ROUNDS if end < count]
        for begin, end in zip([0, *ends], [*ends, count], strict=True):
            if begin and not self._may_spend((end - begin) * len(labels) * self.prospect.target):
                self.left_out["more documents"] = f"the budget is used up after {begin}"
                break
            going_on = list[str]()
            for label in labels:
                try:
                    self._read(reader, [label], reads.of(begin, end))
                except NanInLogits as error:
                    self.left_out[label] = str(error)
                    continue
                going_on.append(label)
            if not going_on:
                raise InputError(f"every method gives logits that are not finite: {self.left_out}")
            whole = [self.variants[label] for label in going_on]
            self.rounds.append(standing(reads.of(0, end).measured(whole, self.stores)))
            labels = list(self.rounds[-1].stay)
            self.hooks.say(f"choose: after {end} documents {', '.join(labels)}")
            if len(labels) == 1 and end >= FEWEST_DOCUMENTS:
                break

    def _read(self, reader: Reader, labels: Sequence[str], reads: Reads) -> Measurement:
        """Read what was not read before; both are spent."""
        variants = [self.variants[label] for label in labels]
        self.spent += sum(map(reads.tokens, variants))
        progress = Progress(hooks=self.hooks, kept_in=self.folder)
        return reader.measure(variants, reads, self.stores, progress)

    def _read_beside(self, reader: Reader, reads: Reads, lowest: str) -> None:
        """Tell how what no checkpoint says reads the same. A budget is for what can be written."""
        for variant in readable(reader.computing, self.prospect.beside):
            try:
                self._read(reader, [variant.label], reads)
            except NanInLogits as error:
                self.left_out[variant.label] = str(error)
                continue
            both = reads.measured([self.variants[lowest], variant], self.stores)
            self.in_memory.append(
                in_memory(variant.label, tail_above(both, variant.label, lowest), lowest)
            )

    def _forgetful(self, reader: Reader, labels: Sequence[str]) -> list[str]:
        """Of those that are equally good in loss, who surely answers fewer questions than the
        lowest."""
        prospect = self.prospect
        items = list[Item]()
        if len(labels) < 2 or not self._may_spend(len(labels) * QUESTIONS * prospect.target):
            return []
        around = repetition(prospect.encoder)
        bos = prospect.encoder.bos
        length = prospect.target - (bos is not None)
        seed = prospect.reading.seed
        for index in range(QUESTIONS // len(PLACES)):
            ask = find_task(TASK).build
            items += ask(
                prospect.encoder, around, length=length, depths=PLACES, index=index, seed=seed
            )
        reads = Reads(prospect.frame, (), tuple((item,) for item in items), bos=bos)
        lowest = labels[0]
        measured = self._read(reader, labels, reads)
        out = [label for label in labels[1:] if lost(measured, label, lowest)]
        self.left_out |= dict.fromkeys(out, f"surely answers fewer questions than {lowest}")
        return out

    def _fitting(self, method: str) -> dict[str, Any]:
        """The keys of a fit that starts from the closed form; {} with the reason noted."""
        from ropext.training import count_training, judge

        prospect = self.prospect
        where = str(self.folder / "choosing.jsonl")
        if method == UNTOUCHED:
            self.left_out[FIT] = "the model untouched is as good as the best closed form"
            return {}
        recipe = {"data": where, "column": None, "split": None, "split_documents": None}
        recipe |= {"within": within} if (within := prospect.recipe.extend.within) else {}
        recipe = {f"{FIT}.{key}": value for key, value in recipe.items()}
        order = [method, *(label for part in reversed(self.rounds) for label in part.behind)]
        starts = [label for label in dict.fromkeys(order) if label != UNTOUCHED][:STARTS]
        named = prospect.recipe.fit and prospect.recipe.fit.start
        for start in [",".join(named)] if named else dict.fromkeys((",".join(starts), method)):
            recipe[f"{FIT}.start"] = start
            chosen = prospect.recipe.chosen(
                {"recipe": {f"{EXTEND}.method": method} | recipe | self._judging()}
            )
            try:
                counted = count_training(
                    FIT,
                    prospect.snapshot.name,
                    where,
                    revision=prospect.recipe.revision,
                    **chosen.fitting,
                )
            except RopextError as error:
                self.left_out[FIT] = str(error)
                continue
            self.left_out.pop(FIT, None)
            if reason := judge.few(counted.judge.documents):
                self.left_out[FIT] = reason
                return {}
            return recipe if self._afford(FIT, counted.tokens, counted.forward_tokens) else {}
        return {}

    def _afford(self, stage: str, trained_on: int, read: int = 0) -> bool:
        """Spend on a stage, or note that the budget does not hold it."""
        cost = TRAINED_COST * trained_on + read
        if self._may_spend(cost):
            self.spent += cost
            return True
        self.left_out[stage] = f"it would take {cost:,} tokens, more than the budget leaves"
        return False

    def _judging(self) -> dict[str, Any]:
        """The keys of the evaluation on documents that took no part."""
        prospect = self.prospect
        recipe = dict[str, Any]()
        if prospect.to_judge:
            recipe |= {"data": str(self.folder / "verdict.jsonl")} | PLAIN
        given = prospect.recipe.evaluation
        if not given.get("lengths"):
            recipe["lengths"] = (prospect.target,)
        if "tasks" not in given:
            recipe |= {"tasks": (TASK,), "depths": PLACES}
        return {f"{EVALUATE}.{key}": value for key, value in recipe.items()}

    def _afford_tuning(self, method: str) -> None:
        """A fine-tuning that the budget does not hold is left out."""
        prospect = self.prospect
        if prospect.recipe.finetune is None or self.budget is None:
            return
        from ropext.training import count_training

        with tempfile.TemporaryDirectory(
            prefix="ropext-choice-", ignore_cleanup_errors=True
        ) as room:
            place = Path(room, "model")
            whole = with_weights(prospect.snapshot)
            how = Writing(link="symlink", no_verify=True)
            write_extension(whole, prospect.plans[method], place, how, NOBODY)
            data = prospect.recipe.finetune.data
            counted = count_training(FINETUNE, place, data, **prospect.recipe.finetuning)
        self._afford(FINETUNE, counted.tokens)
