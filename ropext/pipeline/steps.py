"""The stages of a run: what decides each, what it leaves, and how it is done."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ropext.atomic import write_bytes
from ropext.checkpoint import Snapshot, open_snapshot, with_weights
from ropext.checkpoint.provenance import (
    TRAINED_ON,
    digest,
    read_record,
    rewrite,
    scrub,
    versions,
)
from ropext.checkpoint.staging import recover, remove_output
from ropext.inspecting import plan_of
from ropext.jsontext import dump
from ropext.lengths import doubling_grid
from ropext.models.processes import is_main
from ropext.narration import NOBODY, Call, told_of_files
from ropext.options.evaluate import Evaluate
from ropext.options.extend import Extend
from ropext.options.fields import (
    CONTENT,
    EVALUATE,
    EXTEND,
    FILES,
    FINETUNE,
    FIT,
    NUMBERS,
    Options,
)
from ropext.options.recipe import PLAN, Recipe
from ropext.options.training import Finetune, Fit
from ropext.pipeline.extending import write_extension
from ropext.pipeline.hashes import Hashes
from ropext.pipeline.job import gates_of
from ropext.planning import Plan
from ropext.results import BASE, CONTROL, EXTENDED, FITTED, TUNED, UNTOUCHED
from ropext.results.gates import Gate, Metrics
from ropext.results.metrics import TEXT_METRICS, WHOLE_METRICS
from ropext.results.overlap import both, from_json, trained_in
from ropext.scaling import is_function
from ropext.workdir import MANIFEST, Flat, Ledger, Step, beside, release, remove

# The folder of each stage's checkpoint, which is also its label in the evaluation.
LABELS = {EXTEND: EXTENDED, FIT: FITTED, FINETUNE: TUNED}
EVALUATION = "evaluation"
LOG = "log.txt"
# Evaluated in every run, beside its checkpoints.
READ_ALWAYS = (BASE, UNTOUCHED)
USED = "documents_used"  # of a choice: which documents chose, and which are kept for the verdict
# A number goes up when what a stage does with the same key changes.
SCHEMAS = {"plan": 1, "extend": 1, "fit": 1, "finetune": 1, "evaluate": 2, "report": 2}


def section_key(name: str, options: Options | None, hashes: Hashes, *words: str) -> Flat:
    """What a section decides (if not said otherwise numbers and files), by dotted key; of what it
    names the content."""
    if options is None:
        return {}
    how: dict[str, Any] = {"mode": "json", "by_alias": True, "exclude_none": True}
    key = options.deciding(*words or (NUMBERS, FILES), **how)
    key |= {k: hashes.of_data(place) for k, place in options.deciding(CONTENT, **how).items()}
    return {f"{name}.{k}": value for k, value in key.items() if value != []}


@dataclass
class Work:
    """A run at work: where it keeps what, and what it has found out."""

    job: Recipe
    output: Path  # the finished checkpoint
    folder: Path  # everything else
    call: Call = NOBODY

    @cached_property
    def base(self) -> Snapshot:
        """The model; one whose weights should lie here and do not is refused."""
        snapshot = open_snapshot(self.job.model, revision=self.job.revision)
        if snapshot.hub_id != snapshot.name:
            with_weights(snapshot)
        return snapshot

    @cached_property
    def hashes(self) -> Hashes:
        return Hashes(told_of_files(self.call.hooks.say))

    def say(self, sentence: str) -> None:
        """Tell the user, and write it to the log with its time."""
        if is_main():
            self.call.hooks.say(sentence)
        self.note(sentence)

    @cached_property
    def call_of_stages(self) -> Call:
        """How a stage is called: it replaces what this run wrote, and its words go to the log."""
        return replace(self.call, hooks=replace(self.call.hooks, say=self.say), force=True)

    def note(self, sentence: str) -> None:
        """Write to the log alone, the one place that holds times; a dry run has none."""
        if is_main() and (self.folder / MANIFEST).is_file():
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with (self.folder / LOG).open("a", encoding="utf-8") as stream:
                stream.write(f"{stamp} {scrub(sentence)}\n")

    @cached_property
    def plan(self) -> Plan:
        """What the extension does; made anew every time, from the config alone."""
        made = plan_of(self.base, Extend(**self.job.request), self.base.name)
        made.require_help()
        return made

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "stages", versions())

    def checkpoint(self, stage: str) -> Path:
        """Where a stage writes its checkpoint: under the name of the finished one, so that its
        card and its commands say the right name."""
        return self.folder / LABELS[stage] / self.output.name

    @property
    def checkpoints(self) -> dict[str, Path]:
        """Label to directory, in the order in which they are made."""
        made = [name for name in self.job.stages if name in LABELS]
        return {LABELS[name]: self.checkpoint(name) for name in made}

    @property
    def final(self) -> str:
        """The label of the checkpoint that becomes the output."""
        return list(self.checkpoints)[-1]

    @property
    def labels(self) -> tuple[str, ...]:
        """Who is evaluated."""
        control = (CONTROL,) if self.has_control else ()
        return (*READ_ALWAYS, *control, *self.checkpoints)

    @property
    def has_control(self) -> bool:
        return self.job.finetune is not None and self.job.finetune.control

    @property
    def control(self) -> Path:
        """The adapter of the control, inside of the tuned checkpoint."""
        return self.checkpoint(FINETUNE) / CONTROL

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The recipe's gates, each with whom it is about (the finished checkpoint where it says
        nothing); the path of another run as it lies from here."""
        gates = []
        for gate in gates_of(self.job):
            other = gate.run
            if other is not None and other not in self.labels:
                other = str(self.job.source.entries[EVALUATE, "fail_if"].folder / other)
            gates.append(replace(gate, variant=gate.variant or self.final, run=other))
        return tuple(gates)

    def check_gates(self) -> None:
        """A gate about what will not be measured is told before hours of other work. Of lengths
        that are not given, documents that are too short may leave some out: that is told later."""
        if self.job.evaluate is None:
            return
        options = Evaluate(**self.job.evaluation)
        grid = options.lengths or doubling_grid(self.plan.context, self.plan.target)
        with self.job.told(EVALUATE):
            Metrics(options, self.labels, grid).check(self.gates)

    @property
    def evaluation(self) -> Path:
        return self.folder / EVALUATION

    def steps(self) -> tuple[Step, ...]:
        """All but the report, in their order."""
        makers = {
            PLAN: self._plan,
            EXTEND: self._extend,
            FIT: self._fit,
            FINETUNE: self._finetune,
            EVALUATE: self._evaluate,
        }
        return tuple(makers[name]() for name in self.job.stages if name in makers)

    def _section(self, name: str) -> Flat:
        return section_key(name, getattr(self.job, name), self.hashes)

    def _left(self, name: str) -> Flat | None:
        content = self.hashes.of_tree(self.checkpoint(name))
        return None if content is None else {LABELS[name]: content}

    def _making(self, name: str, key: Callable[[], Flat], make: Callable[[], object]) -> Step:
        """A step that makes a checkpoint; trainings take all processes. After a choice of the
        method its record holds which documents chose, and which will give the verdict."""
        used = self.job.source.choice and self.job.source.choice[USED]
        place = self.checkpoint(name)

        def make_and_record() -> None:
            make()
            if used and (record := read_record(place)) is not None:
                known = both(trained_in(record), from_json(used))
                more = dict(record.more) | {TRAINED_ON: known and known.to_json()}
                rewrite(replace(record, more=more), place)

        def clear() -> None:
            remove(beside(place))  # a training's own checkpoints, of other weights or settings
            remove_output(place)

        def tidy() -> None:
            remove(beside(place))
            release(beside(place), place)
            recover(place)

        return Step(
            name,
            SCHEMAS[name],
            lambda: key() | ({USED: digest(used)} if used else {}),
            lambda: self._left(name),
            make_and_record,
            clear,
            tidy,
            everyone=name != EXTEND,
        )

    def _plan(self) -> Step:
        path = self.folder / "plan.json"

        def key() -> Flat:
            wish = Extend(**self.job.request).model_dump(exclude_none=True)
            values = {f"extend.{name}": value for name, value in wish.items()}
            if is_function(str(wish.get("method"))):  # what it computes now
                spectra = [site.wanted.digest() for site in self.plan.sites]
                values["extend.method.spectra"] = digest(spectra)
            return {"config": digest(self.base.config)} | values

        def make() -> None:
            for remark in self.plan.remarks():
                self.say(remark)
            write_bytes(path, dump(self.plan.to_json()))

        def look() -> Flat | None:
            return {"plan": self.hashes.of(path)} if path.is_file() else None

        return Step(PLAN, SCHEMAS[PLAN], key, look, make, lambda: path.unlink(missing_ok=True))

    def _extend(self) -> Step:
        writing = self.job.extend

        def make() -> None:
            place = self.checkpoint(EXTEND)
            write_extension(self._whole_base, self.plan, place, writing, self.call_of_stages)

        return self._making(
            EXTEND,
            lambda: {
                "base": self.hashes.of_model(self._whole_base),
                "config": digest(self.plan.config),
                "extend.link": writing.link,
                "extend.no_verify": writing.no_verify,
                "extend.hash": writing.hash,
                "output": self.output.name,
            },
            make,
        )

    @cached_property
    def _whole_base(self) -> Snapshot:
        return with_weights(self.base)

    def _fit(self) -> Step:
        options = Fit(**self.job.fitting)

        def key() -> Flat:
            base = {"base": self.hashes.of_model(self._whole_base)}
            base |= section_key(FIT, options, self.hashes)
            return self._section(FIT) | base | {"config": digest(self.base.config)}

        def make() -> None:
            from ropext.training.request import FitRequest

            revision = self.base.commit if self.base.hub_id == self.base.name else None
            data = str(self.job.options(FIT)["data"])
            place = self.checkpoint(FIT)
            call = self.call_of_stages
            request = FitRequest(self.base.name, data, options, revision)
            with request.prepared(place, call) as training:
                training.make(place, call)

        return self._making(FIT, key, make)

    def _finetune(self) -> Step:
        source = FIT if FIT in self.job.stages else EXTEND

        def make() -> None:
            from ropext.training.request import FinetuneRequest

            data = str(self.job.options(FINETUNE)["data"])
            place = self.checkpoint(FINETUNE)
            call = self.call_of_stages
            options = Finetune(**self.job.finetuning)
            request = FinetuneRequest(str(self.checkpoint(source)), data, options)
            with request.prepared(place, call) as training:
                training.make(place, call)

        return self._making(
            FINETUNE, lambda: self._section(FINETUNE) | (self._left(source) or {}), make
        )

    def _evaluate(self) -> Step:
        results = self.evaluation / "results.json"

        def key() -> Flat:
            made = self.contents().items()
            contents = {f"checkpoint.{label}": content for label, content in made}
            lengths = {"context": self.plan.context, "limit": self.plan.target}
            # A metric that is added later is not in the results of an earlier run.
            names = [metric.name for metric in (*TEXT_METRICS, *WHOLE_METRICS)]
            return self._section(EVALUATE) | contents | lengths | {"metrics": ",".join(names)}

        def look() -> Flat | None:
            whole = results.is_file() and (self.evaluation / "report.html").is_file()
            return {"results": self.hashes.of(results)} if whole else None

        def make() -> None:
            from ropext.evaluation.preparing import prepare
            from ropext.evaluation.session import EvaluationJob

            call = self.call_of_stages
            options = Evaluate(**self.job.evaluation)
            evaluation = prepare(options, self.lineup(), call.trust_remote_code, self.gates)
            evaluation.tell_warnings(self.say)
            EvaluationJob(evaluation, self.gates).make(self.evaluation, call)

        # What was read of models that are still the same stays, and is not read again.
        clear = partial(results.unlink, missing_ok=True)
        tidy = partial(release, self.evaluation, self.evaluation)
        return Step(EVALUATE, SCHEMAS[EVALUATE], key, look, make, clear, tidy, everyone=True)

    def contents(self) -> dict[str, str]:
        """Digests of all bytes of the base and of each checkpoint, by label."""
        made = {label: str(self.hashes.of_tree(place)) for label, place in self.checkpoints.items()}
        if self.has_control:
            made[CONTROL] = str(self.hashes.of_tree(self.control))
        return {"base": self.hashes.of_model(self._whole_base)} | made

    def lineup(self) -> Any:
        """Who is evaluated."""
        from ropext.evaluation.lineup import line_up_checkpoints

        return line_up_checkpoints(
            self._whole_base,
            {label: open_snapshot(str(place)) for label, place in self.checkpoints.items()},
            context=self.plan.context,
            limit=self.plan.target,
            contents=self.contents(),
            control=self.control if self.has_control else None,
        )
