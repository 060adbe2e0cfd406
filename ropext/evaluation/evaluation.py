"""Run one evaluation: measure the units that the stores lack, gather the numbers, write the
report."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ropext.base import guard, workdir
from ropext.base.errors import NothingKept, UsageError
from ropext.base.jsontext import digest
from ropext.base.narration import Call, Hooks, Say, Show, clean_command, file_progress, no_progress
from ropext.base.workdir import USED, Workdir
from ropext.evaluation import harness
from ropext.evaluation.assembling import assembled
from ropext.evaluation.corpus import Corpus, DocumentEncoder
from ropext.evaluation.costs import Costs, check_models, count_evaluation
from ropext.evaluation.lineup import Lineup, fetched
from ropext.evaluation.reader import Models, Progress, Reader
from ropext.evaluation.workload import Workload
from ropext.files.checkpoint import Snapshot, provenance
from ropext.files.checkpoint.digests import Digests
from ropext.models.load import (
    device_of,
    load_model,
    loading_of,
    memory_errors,
    out_of_memory,
    report_memory_used,
    silenced,
)
from ropext.models.processes import is_main, rank_and_count, wait_for_everyone
from ropext.options.evaluate import Evaluate
from ropext.options.fields import CONTENT, NEUTRAL, NUMBERS
from ropext.results import BASE, SCHEMA, rundir
from ropext.results.gates import Gate
from ropext.results.measurement import Measurement, Store
from ropext.results.numbers import EvaluationFacts
from ropext.results.overlap import Overlap
from ropext.results.perplexity import SHORT_WINDOW, Protocol
from ropext.results.report.evaluation import write_report

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COMPUTING = ("torch", "transformers", "peft", "accelerate", "ropext")
PREPARING = ("tokenizers", "numpy")  # they encode a text before a model reads it
LIBRARIES = COMPUTING + PREPARING
# The keys that decide the losses and answers of a variant, next to the document or the question.
OF_EVERY_UNIT = (
    "schema",
    "masking",
    "context",
    "tokenizer_sha256",
    "bos",
    "short_window",
    "versions",
)
NOTHING_KEPT = "interrupted; nothing was kept (-o RUN keeps what is finished)"
LIVE_KEPT_NOTHING = (
    "interrupted; nothing was kept (results of a model in memory are kept only when complete)"
)


@dataclass(frozen=True)
class Evaluation:
    """An evaluation in which everything that needs no weights is decided: models, documents,
    questions."""

    options: Evaluate
    lineup: Lineup
    encoder: DocumentEncoder
    trust_remote_code: bool
    corpus: Corpus | None
    reads: Workload
    protocol: Protocol
    warnings: tuple[str, ...]
    overlaps: Mapping[str, Overlap]  # for the variants that were trained, by label
    gates: Sequence[Gate] = ()  # judged on the numbers
    losses: Path | None = None  # a parquet file for the loss of every token

    def check(self, output: Path, call: Call) -> None:
        """Raise an error if the output holds other work."""
        for variant in self.lineup.variants:
            if not variant.snapshot.weight_files:
                return  # make() fetches the weights, and they decide which run it is
        self.workdir(output).check(call.force)

    def counts(self) -> Costs:
        """Count an evaluation's passes, tokens and bytes; raise an error if the models cannot be
        read with these options."""
        check_models(self.lineup, self.options, self.trust_remote_code)
        return count_evaluation(self.lineup, self.options, self.reads, self.trust_remote_code)

    def tell_warnings(self, say: Say) -> None:
        """Print the evaluation's warnings before anything is read, in the main process only."""
        if is_main():
            for warning in self.warnings:
                say(f"warning: {warning}")

    def make(self, output: Path | None, call: Call) -> Measurement:
        """Measure the models of the evaluation, and return the measurement.

        With an output every finished piece is kept there, and the same call resumes from it. The
        report is written while nobody else may write into the folder. Without an output no weight
        is hashed. For a model in memory the output gets its results at the end.
        """
        hooks = call.hooks
        rank, world = rank_and_count()
        if output is None and world > 1:
            raise UsageError("several processes share their work through a directory; give -o RUN")
        if world > 1 and self.lineup.held is not None:
            raise UsageError(
                "several processes share their work through a directory, and a model in memory "
                "writes none; ropext.save it and evaluate what that wrote"
            )
        wait_for_everyone()  # so that all notice if one raises an error
        _check_stop(hooks)
        evaluation = replace(self, lineup=fetched(self.lineup))
        _check_stop(hooks)
        read = {"MODEL": [variant.snapshot.directory for variant in evaluation.lineup.variants]}
        guard.check(read, {"--output": output})
        with ExitStack() as stack:
            place = None
            if output is not None:
                place = evaluation.workdir(output, call.command, file_progress(hooks.say))
                stack.enter_context(place.claimed(call.force, rank, world, hooks.say))
            stack.enter_context(silenced())
            done = evaluation._measure(place, hooks)
            if rank == 0:
                done = replace(done, gates=tuple(rundir.judge_gates(done, self.gates)))
                self._write(done)
        return done

    def workdir(
        self, output: Path, command: Sequence[str] = (), show: Show = no_progress
    ) -> Workdir:
        """Return the folder of this evaluation, with the settings that must be equal to resume
        there.

        It reads weights whose digests are not remembered, and shows the progress.
        """
        lineup = self.lineup
        options = self.options
        reads = self.reads
        items = [item.identity for group in reads.questions for item in group]
        tokenizer = self.encoder.tokenizer
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        template = str(getattr(tokenizer, "chat_template", None))
        decides = {
            "schema": SCHEMA,
            "protocol": self.protocol.name,
            "protocol_text": self.protocol.text,
            "settings": options.deciding(NUMBERS),
            "context": lineup.context,
            "lengths": list(reads.frame.lengths),
            "variants": lineup.contents(Digests(show), self.trust_remote_code),
            "tokens_sha256": list(reads.hashes),
            "questions_sha256": digest(items),
            "tokenizer_sha256": digest([vocabulary, template]),
            "bos": reads.bos,
            "short_window": SHORT_WINDOW,
            "versions": provenance.installed(LIBRARIES),
        }
        decides |= reads.prediction.key()
        about = {
            "words": list(clean_command(command)),
            "names": options.deciding(CONTENT, NEUTRAL)
            | {"models": {variant.name: variant.snapshot.name for variant in lineup.variants}},
        }
        return Workdir(output, "eval", decides, about)

    def stores(self, place: Workdir) -> dict[str, str]:
        """Return the folder name of each variant's readings, by its label.

        A folder holds the readings of this very model by these settings, whichever run made them.
        Documents and questions name the files.
        """
        rest = {key: value for key, value in place.decides.items() if key in OF_EVERY_UNIT}
        rest["dtype"] = self.options.dtype
        rest["attn_implementation"] = self.options.attn_implementation
        if "masking" in rest:
            rest["lengths"] = place.decides["lengths"]  # the shortest bounds the tail
        contents = place.decides["variants"]
        names = {}
        for variant in self.lineup.variants:
            key = digest([contents[variant.name], variant.config, rest])
            names[variant.label] = f"{variant.name}-{key[:16]}"
        return names

    def _measure(self, place: Workdir | None, hooks: Hooks) -> Measurement:
        """Measure the documents and questions that the stores lack, and gather the results; in a
        folder, keep them."""
        variants = self.lineup.variants
        names = {variant.label: "" for variant in variants}
        if place is not None:
            names = self.stores(place)
        reads = self.reads
        if self.options.kl:
            reads = replace(reads, against=names[BASE])
        resumable = None if self.lineup.held else place
        with _stores(names, resumable, on_disk=self.options.kl) as stores:
            wait_for_everyone()  # the first process has claimed the folder
            progress = self._progress(resumable, hooks)
            models = Models(partial(self._load, progress), self._adapters(place))
            done = Reader(models.computing, self.options).measure(variants, reads, stores, progress)
            if progress.rank != 0:
                return replace(done, path=progress.kept_in)
            if place is not None:
                units = [(v, unit) for v in variants for unit in reads.units(v)]
                kept = {f"{names[v.label]}/{name}" for v, unit in units for name in unit.files}
                rundir.remove_unused_units(place.folder, kept)
            facts = self._facts()
            if self.options.lm_eval:
                tokenizer = self.encoder.tokenizer
                longest = reads.frame.longest
                scores = harness.run_tasks(
                    models.computing, tokenizer, self.options, longest, variants, stores
                )
                facts = replace(facts, lm_eval=scores)
            whole = assembled(done, facts, reads, variants, self.overlaps, names)
            if place is not None:
                place.write_results()
                if resumable is None:
                    by_name = {names[label]: stores[label] for label in names}
                    rundir.write_stores(place.folder, by_name)
                rundir.save_run(place.folder, whole)
        measurable = replace(whole.without(whole.facts.not_measurable), resumed=progress.resumed)
        if place is None:
            return measurable
        manifest = workdir.read(place.folder)
        assert manifest is not None  # `write_results` wrote it
        return replace(measurable, manifest=manifest, path=place.folder)

    def _facts(self) -> EvaluationFacts:
        """Return the facts about the numbers that are known before they are gathered."""
        return EvaluationFacts(
            protocol=self.protocol.name,
            protocol_text=self.protocol.text,
            headline=self.protocol.headline,
            short_window=SHORT_WINDOW,
            documents=self.corpus.to_json() if self.corpus else None,
            warnings=self.warnings,
        )

    def _progress(self, place: Workdir | None, hooks: Hooks) -> Progress:
        """Return a new progress of the evaluation; `place` is the folder of a run that can be
        resumed."""
        rank, world = rank_and_count()
        held = self.lineup.held
        device = str(held.live.device) if held else device_of(self.options.device)
        log = None if place is None else place.folder / USED
        return Progress(
            hooks=hooks if rank == 0 else replace(hooks, show=no_progress),
            kept_in=None if place is None else place.output,
            nothing_kept=LIVE_KEPT_NOTHING if held else NOTHING_KEPT,
            rank=rank,
            world=world,
            used=partial(report_memory_used, log, hooks.say, device),
            guard=lambda what: memory_errors(out_of_memory(what)),
        )

    def _load(self, progress: Progress, snapshot: Snapshot) -> "PreTrainedModel":
        """Load one of the models that the evaluation measures."""
        with memory_errors(out_of_memory(f"the weights of {snapshot.name}")):
            progress.hooks.say(f"loading {snapshot.name}")
            how = loading_of(self.options, self.trust_remote_code, self.lineup.masked)
            model = load_model(snapshot, how)
        if progress.hooks.stop():  # the user interrupted meanwhile
            raise progress.stopped()
        return model

    def _adapters(self, place: Workdir | None) -> dict[str, str]:
        """Return the digests of the adapters, which the folder of a run stores."""
        digests = dict[str, str]()
        for variant in self.lineup.variants:
            if variant.adapter is None or self.lineup.held is not None:
                continue
            if place is None:
                digests[variant.adapter] = str(variant.adapter_sha256)
            else:
                content = place.decides["variants"][variant.name]
                digests[variant.adapter] = content["adapter_sha256"]
        return digests

    def _write(self, done: Measurement) -> None:
        """Write a finished measurement: the losses of its documents (--losses), and the report of
        the evaluation."""
        corpus = self.corpus
        if self.losses is not None and corpus is not None:
            texts = ((document.name, document.ids) for document in corpus.documents)
            rundir.write_losses(self.losses, texts, done)
        if done.path is not None:
            write_report(done)


def _check_stop(hooks: Hooks) -> None:
    """Raise NothingKept if the user interrupted an evaluation while documents were read or weights
    fetched."""
    if hooks.stop():
        raise NothingKept("interrupted before the first measurement")


@contextmanager
def _stores(
    names: Mapping[str, str], place: Workdir | None, *, on_disk: bool
) -> Iterator[dict[str, Store]]:
    """Yield the store of each variant's losses and answers, by its label.

    It is in the folder of a run that can resume, otherwise in memory, or temporarily `on_disk` (the
    base's states are large).
    """
    if place is not None:
        yield {label: rundir.variant_store(place.folder, name) for label, name in names.items()}
    elif on_disk:
        # Windows does not delete files that a virus scanner still reads.
        with tempfile.TemporaryDirectory(prefix="ropext-", ignore_cleanup_errors=True) as folder:
            yield {label: Store(Path(folder, label)) for label in names}
    else:
        yield {label: Store() for label in names}
