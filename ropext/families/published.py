"""Hold the authors' recipes for a model's length: published.json, one recipe per model shape."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from ropext.families.config import packaged_facts
from ropext.families.model import Model
from ropext.scaling import forms
from ropext.scaling.rope import RopeSite, Spectrum

_NAMES = {"yarn": "YaRN", "llama3": "llama3", "longrope": "LongRoPE"}


@dataclass(frozen=True)
class Witness:
    """A statement about the same models by others than the authors, with its source."""

    said: str
    source: str
    date: str
    needles: bool = False  # found keys, which are easier than a text's next word

    @property
    def sentence(self) -> str:
        """Return the statement of others about a published model's scaling, with date and
        source."""
        easy = ", needles alone" if self.needles else ""
        return f"{self.said} ({self.date}{easy}; {self.source})"


class PlannedScaling(Protocol):
    """The part of a plan that is compared with a recipe."""

    @property
    def model(self) -> Model:
        """Return the model of a config, whose authors may have published a recipe to compare
        with."""
        ...

    @property
    def method(self) -> str:
        """Return the method with which the published recipe of a model's authors is compared."""
        ...

    @property
    def context(self) -> int:
        """Return the context from which the factor counts, with which the published recipe of a
        model's authors is compared."""
        ...

    @property
    def target(self) -> int:
        """Return the target with which the length of the published recipe of a model's authors is
        compared."""
        ...

    @property
    def main(self) -> RopeSite:
        """Return the scaled rotary embedding with whose frequencies the published recipe of a
        model's authors is compared."""
        ...


@dataclass(frozen=True)
class Published:
    """A recipe, its source, and the configs that it is for."""

    models: str
    types: list[str]  # types of the text part
    stated: int  # max_position_embeddings as released
    method: str  # "" = its authors publish none
    context: int
    factor: float
    source: str
    theta: float | None = None
    head_dim: int | None = None
    ships: bool = False  # the released config has it
    options: str = ""  # further flags that the method needs
    keys: dict[str, Any] = field(default_factory=dict)  # of its rope dict, beyond those above
    date: str = ""  # date of the source
    card: int | None = None  # tokens that the authors' card states, if the config states less
    others: tuple[Witness, ...] = ()  # sources that state something else, or observed the result

    @property
    def how(self) -> str:
        """Return the published recipe in words: its method, factor and context."""
        return f"{_NAMES[self.method]} {self.factor:g} from {self.context:,}"

    def fits(self, model: Model) -> bool:
        """Return whether the config has this published recipe, or is the released config without
        it."""
        site = model.scaled_sites[0]
        lengths = (self.stated, round(self.context * self.factor))
        shape = model.text_type in self.types and model.stated_context in lengths
        shape = shape and self.theta in (None, site.rope.theta)
        shape = shape and self.head_dim in (None, model.head_dim)
        return shape and (self.carried(model) or not (self.ships or site.rope.is_scaled))

    def carried(self, model: Model) -> bool:
        """Return whether the config's rope dict is this published recipe."""
        site = model.scaled_sites[0]
        stated = (site.params["rope_type"], site.params.get("factor"), site.rope.original_context)
        return stated == (self.method, self.factor, self.context)

    @property
    def longest(self) -> int:
        """Return the tokens that the published recipe reaches."""
        return round(self.context * self.factor)

    def spectrum(self, model: Model, target: int) -> Spectrum:
        """Return the RoPE frequencies that the published recipe of a model's authors means at a
        target, from its keys and the released rope dict."""
        site = model.scaled_sites[0]
        released = dict(site.params) if self.ships else {}
        lengths = {
            "rope_type": self.method,
            "rope_theta": site.rope.theta,
            "factor": target / self.context,
            "original_max_position_embeddings": self.context,
        }
        return forms.read(released | self.keys | lengths, site.rope).spectrum

    def is_method_of(self, plan: PlannedScaling) -> bool:
        """Return whether the published recipe of a model's authors has a plan's method and context,
        and reaches its target."""
        same = (plan.method, plan.context) == (self.method, self.context)
        return same and plan.target <= self.longest

    def agrees(self, plan: PlannedScaling) -> bool:
        """Return whether the published recipe of a model's authors has a plan's frequencies and
        attention factor, at its factor or at a smaller one."""
        if not self.is_method_of(plan):
            return False
        return forms.same(plan.main.wanted, self.spectrum(plan.model, plan.target))

    def understates(self, context: int, target: int) -> bool:
        """Return whether the config states less than its authors' card, which reaches the
        target."""
        return self.card is not None and context == self.stated and target <= self.card

    @property
    def why_length_alone(self) -> str:
        """Return the reason to raise the stated length of config.json alone, up to the length on
        the authors' card."""
        place = f"{self.date}; {self.source}"
        seen = "; ".join(one.sentence for one in self.others)
        return (
            f"the config of {self.models} states {self.stated:,} tokens and its authors' card"
            f" {self.card:,} ({place}): nothing has to be scaled up to there; {seen}"
        )

    @property
    def contradiction(self) -> str:
        """Return others' statements about the models of a published recipe, and a way to decide; ""
        if there are none."""
        if not self.others or not self.method:
            return ""
        seen = "; ".join(one.sentence for one in self.others)
        return (
            f"sources do not agree whether {self.models} need a scaling: {seen}. Your texts decide:"
            " ropext extend MODEL --method auto --data TEXTS, or ropext eval --endpoint URL of the"
            " plain server"
        )

    def against(self, plan: PlannedScaling) -> str:
        """Return a clause that compares the published recipe of a model's authors with a plan; if
        they differ, it has the recipe's options."""
        if self.card is not None:
            return (
                f"its authors' card states {self.card:,} tokens ({self.models}; {self.source}):"
                f" up to there --length-only --target {self.card} is enough; they publish no"
                " scaling beyond"
            )
        if not self.method:
            return (
                f"the authors of {self.models} publish no scaling of it ({self.source}): measure"
                " what this one does (--measure DATA)"
            )
        if self.agrees(plan):
            recipe = f"({self.models}: {self.how})"
            if plan.target == self.longest:
                return f"as its authors publish {recipe}; {self.source}"
            factor = plan.target / plan.context
            return f"its authors' method {recipe} with a smaller factor, {factor:g}; {self.source}"
        start = "" if self.context == self.stated else f"--context {self.context} "
        carried = self.carried(plan.model)
        start = "--from-original " if carried else start
        then = f": --method {self.method} {start}--factor {self.factor:g} {self.options}".strip()
        if carried and plan.context != self.context:
            then = ", which its config has, and this goes on from there"
        elif self.is_method_of(plan):
            then += " (this plan has other frequencies or another attention factor)"
        return f"its authors publish {self.how} ({self.models}){then}; {self.source}"


def recipe_of(model: Model) -> Published | None:
    """Return the recipe in published.json of this model's authors, if it is known."""
    for entry in packaged_facts("published.json"):
        others = tuple(Witness(**other) for other in entry.get("others", ()))
        recipe = Published(**(entry | {"others": others}))
        if recipe.fits(model):
            return recipe
    return None
