"""What each method makes of one model at one target: its spectrum, the stock dict that carries it,
and who reads that. Each is computed once, however many rows, ways and refusals speak of it."""

from dataclasses import dataclass, replace

from ropext import forms, scaling
from ropext.errors import UsageError, listed
from ropext.loaders import WRONG, LoaderReading, newest
from ropext.options.extend import Extend, knobs_for
from ropext.planning.carrier import Carrier, carry
from ropext.rope import Explanation, RopeSite, explain

LENGTH_ONLY = "length-only"  # takes the place of a method


@dataclass(frozen=True)
class MethodRow:
    """A method's two numbers for this model and target; None where it needs an input of its own."""

    method: str
    explanation: Explanation | None
    form: str | None  # the rope type that would carry it, None where nothing can
    note: str = ""
    attention_factor: float = 1.0
    read_by: tuple[str, ...] = ()  # loaders that read it as planned, in their newest version ...
    misread_by: tuple[str, ...] = ()  # ... and those that were seen to read something else


@dataclass(frozen=True)
class Attempt:
    """All of a request that decides what a method gives at a place."""

    method: str
    knobs: object  # of the method, frozen
    from_original: bool
    attention: float | None
    for_loaders: tuple[str, ...]
    even_so: bool


def attempt_of(recipe: Extend, method: str, knobs: object) -> Attempt:
    """Return the attempt that a request makes with a method."""
    return Attempt(
        method,
        knobs,
        recipe.from_original,
        recipe.attention,
        recipe.for_loaders,
        recipe.even_so,
    )


@dataclass(frozen=True)
class WishedSite:
    """What a method asks for at a site, and the method's own dict for it."""

    site: RopeSite  # with the embedding that is scaled, the wanted spectrum, and the dict as it was
    native: forms.Params | None
    moves: bool  # whether any pair rotates otherwise than before


class Attempts:
    """The attempts for one model and target."""

    def __init__(self, carrier: Carrier, target: int) -> None:
        self.carrier = carrier
        self.model = carrier.model
        self.target = target
        self._wishes: dict[tuple[str, Attempt], WishedSite] = {}
        self._planned: dict[tuple[str, Attempt], RopeSite | None] = {}
        self._readings: dict[tuple[str, Attempt], tuple[LoaderReading, ...]] = {}

    def wish(self, site: RopeSite, attempt: Attempt) -> WishedSite:
        """Return what the method asks for; raise UsageError if it cannot be run so."""
        # Who reads the result does not change it.
        key = (site.label, replace(attempt, for_loaders=(), even_so=False))
        if key in self._wishes:
            return self._wishes[key]
        rope = site.rope
        if attempt.from_original:
            rope = site.rope.original()
        if attempt.method == LENGTH_ONLY:
            wish = WishedSite(site.of(rope), _stated_anew(site, self.target), moves=False)
        else:
            knobs = attempt.knobs
            scaled = scaling.scale(rope, attempt.method, self.target, knobs, attempt.attention)
            wanted = scaling.compose(rope, scaled, self.target)
            native = scaling.native(rope, scaled)
            moves = wanted.inv_freq != rope.spectrum.inv_freq
            wish = WishedSite(replace(site, rope=rope, wanted=wanted), native, moves)
        self._wishes[key] = wish
        return wish

    def planned(self, site: RopeSite, attempt: Attempt) -> RopeSite | None:
        """Return the site with the dict that carries it as asked; None if none does."""
        key = (site.label, attempt)
        if key not in self._planned:
            wish = self.wish(site, attempt)
            names = attempt.for_loaders
            even_so = attempt.even_so
            params = carry(self.carrier, wish.site, wish.native, self.target, names, even_so)
            self._planned[key] = None if params is None else replace(wish.site, params=params)
        return self._planned[key]

    def readings(self, site: RopeSite, attempt: Attempt) -> tuple[LoaderReading, ...]:
        """Return how each loader reads the dict that carries it."""
        key = (site.label, attempt)
        if key not in self._readings:
            planned = self.planned(site, attempt)
            assert planned is not None  # who asks has seen that it can be written
            self._readings[key] = self.carrier.readings(planned, self.target)
        return self._readings[key]

    def row(self, recipe: Extend, method: str, chosen: str = "") -> MethodRow:
        """Return the two numbers of a method, and the form that would carry it; with the request's
        knobs if it is the chosen one."""
        if method == chosen:
            knobs = knobs_for(recipe, method)
        elif needs := scaling.find(method).needs:
            return MethodRow(method, None, None, f"needs {needs}")
        else:
            knobs = scaling.find(method).knobs()
        attempt = attempt_of(recipe, method, knobs)
        site = self.model.scaled_sites[0]
        try:
            wish = self.wish(site, attempt)
        except UsageError as error:
            return MethodRow(method, None, None, str(error))
        explanation = explain(site.rope, wish.site.wanted, self.target)
        if not wish.moves and attempt.attention is None and not attempt.even_so:
            return MethodRow(method, explanation, None, "moves no pair here")
        planned = self.planned(site, attempt)
        if planned is None:
            where = f"for {listed(attempt.for_loaders)}" if attempt.for_loaders else "here"
            return MethodRow(method, explanation, None, f"cannot be written exactly {where}")
        readings = newest(self.readings(site, attempt))
        return MethodRow(
            method,
            explanation,
            planned.params["rope_type"],
            attention_factor=planned.wanted.attention_factor,
            read_by=tuple(r.loader for r in readings if r.verdict == "same"),
            misread_by=tuple(r.loader for r in readings if r.verdict in WRONG),
        )

    def able(self, recipe: Extend) -> list[str]:
        """The methods that could be written, at their default knobs."""
        rows = [self.row(recipe, method) for method in scaling.METHODS]
        return [row.method for row in rows if row.form]


def _stated_anew(site: RopeSite, target: int) -> forms.Params:
    """The rope dict as it stands, beside a stated length of `target`.

    Of a longrope vLLM and Phi-3's own class derive the attention factor from the two lengths, so
    that the dict has their ratio, and an attention factor that is another has to be written.
    """
    params = site.params
    if params["rope_type"] != "longrope" or params.get("mscale_all_dim"):
        return params  # DeepSeek's softmax reads the factor itself
    return params | {"factor": target / params["original_max_position_embeddings"]}
