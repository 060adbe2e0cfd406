"""Plan the choice of `--method auto` before any weight is read: its methods and its documents."""

from dataclasses import dataclass

from ropext.base.errors import RopextError, UsageError
from ropext.base.jsontext import JsonObject
from ropext.base.lengths import forward_tokens, short_windows
from ropext.base.narration import Call
from ropext.evaluation.corpus import Document, DocumentEncoder
from ropext.evaluation.dividing import divide
from ropext.evaluation.documents import encoder_of
from ropext.evaluation.measured_plan import (
    MethodComparison,
    closed_forms,
    memory_only_variants,
)
from ropext.evaluation.workload import NEXT_TOKEN
from ropext.files.checkpoint import open_snapshot
from ropext.options.evaluate import DEPTHS, Evaluate
from ropext.options.fields import EVALUATE, FIT
from ropext.pipeline.checked_recipe import placed_gates
from ropext.pipeline.recipe import Recipe
from ropext.pipeline.run_context import LABELS, READ_ALWAYS
from ropext.planning import make_plan
from ropext.results import CONTROL, TUNED, UNTOUCHED
from ropext.results.gates import GateMetrics
from ropext.results.measurement import MeasuredModel
from ropext.results.perplexity import LossStatistics

# The task of the verdict if the recipe names none.
TASK = "passkey"
PLACES = DEPTHS[:4]
STAYS = ("method", "theta", "even_so")  # options that leave a model as it is: its own theta


@dataclass(frozen=True)
class PlannedChoice:
    """The planned choice of a method: the candidates and the documents."""

    recipe: Recipe
    compared: MethodComparison  # the untouched model, if it can be written, and the methods
    left_out: dict[str, str]  # method -> why it cannot be written
    reading: Evaluate
    encoder: DocumentEncoder
    to_choose: list[Document]
    to_judge: list[Document]  # none if the recipe names other documents for the verdict
    able: int  # documents for the choice that reach the target
    frame: LossStatistics

    @property
    def target(self) -> int:
        """Return the target of `--method auto`, the longest length that it reads."""
        return self.frame.longest

    @property
    def documents(self) -> int:
        """Return the number of documents that each candidate reads."""
        return min(self.able, self.reading.max_docs)

    @property
    def tokens(self) -> int:
        """Return the forward tokens of the choice: every candidate reads every document once."""
        return len(self.compared.labels) * self.documents * self.target

    @property
    def verdict_tokens(self) -> int:
        """Return the forward tokens of the evaluation at the end.

        It reads the base on short windows, the untouched base, the extension, and the trained model
        if there is one.
        """
        documents = len(self.to_judge) or self.documents
        models = 3 if self.recipe.finetune is None else 4
        questions = len(PLACES) * self.reading.items
        base = documents * forward_tokens(short_windows(self.target, self.frame.context))
        return base + models * (documents + questions) * self.target

    def check_gates(self) -> None:
        """Refuse a gate about a number that the verdict will not measure."""
        options = self.recipe.evaluate_options(dict(self.reading) | {"tasks": (TASK,)})
        models = dict.fromkeys((*READ_ALWAYS, *LABELS.values(), CONTROL), MeasuredModel())
        final = TUNED if self.recipe.finetune else None  # else the choice decides
        gates = placed_gates(self.recipe, models, final)
        with self.recipe.source.naming(EVALUATE):
            GateMetrics(options, models, options.lengths or (self.target,)).check(gates)

    def rows(self) -> list[tuple[str, str]]:
        """Return each stage with a sentence about its work."""
        judges = "evaluate.data"
        if self.to_judge:
            judges = f"{len(self.to_judge)} documents that take no part in choosing"
        candidates = ", ".join(self.compared.labels)
        choice = f"{candidates}: {self.tokens:,} tokens, on {self.documents} documents"
        return [
            ("choose", choice),
            (FIT, "from the closed form that is taken, if it can be written"),
            (EVALUATE, f"about {self.verdict_tokens:,} tokens, on {judges}"),
        ]

    def to_json(self) -> JsonObject:
        """Return the content of --dry-run."""
        return {
            "stages": dict(self.rows()),
            "left_out": self.left_out,
            "forward_tokens": self.tokens + self.verdict_tokens,
        }


def plan_choice(recipe: Recipe, call: Call) -> PlannedChoice:
    """Read the config and the documents, and return the planned choice.

    Raise every error that the choice would raise.
    """
    snapshot = open_snapshot(recipe.model, revision=recipe.revision)
    request = recipe.extend_options()
    closed, left_out = closed_forms(snapshot, request)
    example = next(iter(closed.values()))
    if example.model.masked_lm:
        raise UsageError("--method auto measures causal language models; name a method")
    example.raise_if_refused()
    if not recipe.trains:
        example.require_training()
    stays = dict(zip(STAYS, ("abf", example.main.rope.theta, True), strict=True))
    try:
        plans = {UNTOUCHED: make_plan(snapshot.config, request.changed(**stays), recipe.model)}
    except RopextError:
        plans = {}  # the user gave a temperature, or no theta gives this family's spectrum
    place = str(recipe.extend.data)
    texts = {"data": place, "lengths": (example.target,)}
    reading = recipe.evaluate_options(texts).changed(**texts)
    encoder = encoder_of(snapshot, reading, call.trust_remote_code)
    has_judges = recipe.evaluate is not None and bool(recipe.evaluate.data)
    documents = divide(reading, encoder, example.target, has_judges)
    made = PlannedChoice(
        recipe=recipe,
        compared=MethodComparison(
            snapshot, plans | closed, memory_only_variants(snapshot, request)
        ),
        left_out=left_out,
        reading=reading,
        encoder=encoder,
        to_choose=documents.chosen + documents.short,
        to_judge=documents.judged,
        able=len(documents.chosen),
        frame=NEXT_TOKEN.frame(example.context, (example.target,), reading.seed),
    )
    made.check_gates()
    return made
