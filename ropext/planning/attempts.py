"""What each method makes of one model at one target: its spectrum, the stock dict that carries it,
and who reads that. Each is computed once, however many rows, ways and refusals speak of it."""

from dataclasses import dataclass, replace

from ropext import families, forms, loaders, scaling
from ropext.errors import NotExpressible, UsageError, listed
from ropext.families import Model
from ropext.loaders import LoaderReading
from ropext.options.extend import Extend, knobs_for
from ropext.planning.plan import LENGTH_ONLY, WRONG, MethodRow, newest, readings_of
from ropext.rope import Rope, RopeSite, Spectrum, explain


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
    """The attempt that a request makes with a method."""
    return Attempt(
        method,
        knobs,
        recipe.from_original,
        recipe.attention,
        recipe.for_loaders,
        recipe.even_so,
    )


@dataclass(frozen=True)
class WantedSpectrum:
    """The spectrum that a method asks for at a place, and the method's own dict for it."""

    site: RopeSite
    rope: Rope  # the one that is scaled: with from_original that before the config's scaling
    spectrum: Spectrum
    native: forms.Params | None

    @property
    def moves(self) -> bool:
        """Whether any pair turns otherwise than before."""
        return self.spectrum.inv_freq != self.rope.spectrum.inv_freq


class Attempts:
    """The attempts for one model and target."""

    def __init__(self, model: Model, target: int) -> None:
        self.model = model
        self.target = target
        self._wanted: dict[tuple[str, Attempt], WantedSpectrum] = {}
        self._params: dict[tuple[str, Attempt], forms.Params | None] = {}
        self._readings: dict[tuple[str, Attempt], tuple[LoaderReading, ...]] = {}
        self._rows: dict[Attempt, MethodRow] = {}

    def wanted(self, site: RopeSite, attempt: Attempt) -> WantedSpectrum:
        """What the method asks for; UsageError where it cannot be run so."""
        # Who reads the result does not change it.
        key = (site.label, replace(attempt, for_loaders=(), even_so=False))
        if key not in self._wanted:
            self._wanted[key] = self._new_wanted(site, attempt)
        return self._wanted[key]

    def _new_wanted(self, site: RopeSite, attempt: Attempt) -> WantedSpectrum:
        rope = site.rope.original() if attempt.from_original else site.rope
        if attempt.method == LENGTH_ONLY:
            return WantedSpectrum(site, rope, rope.spectrum, _stated_anew(site, self.target))
        scaled = scaling.scale(rope, attempt.method, self.target, attempt.knobs, attempt.attention)
        spectrum = scaling.compose(rope, scaled, self.target)
        return WantedSpectrum(site, rope, spectrum, scaling.native(rope, scaled))

    def params(self, site: RopeSite, attempt: Attempt) -> forms.Params | None:
        """The stock dict that carries it as asked; None where none does."""
        key = (site.label, attempt)
        if key not in self._params:
            self._params[key] = self._carried(self.wanted(site, attempt), attempt)
        return self._params[key]

    def _carried(self, wanted: WantedSpectrum, attempt: Attempt) -> forms.Params | None:
        model = self.model
        rope = wanted.rope

        def accept(params: forms.Params) -> bool:
            if params["rope_type"] not in model.forms:
                return False
            # A length that also scales queries stays, and may be another than this form asks for.
            scaled = families.keep_query_scales(wanted.site.params, params)
            if not forms.same(forms.read(scaled, rope, self.target), wanted.spectrum):
                return False
            if model.container:
                params = scaled
            else:
                params = families.as_written(model.text_type, params, rope)
            return self.are_exact(attempt.for_loaders, wanted, params, even_so=attempt.even_so)

        try:
            carried = forms.carry(rope, wanted.spectrum, self.target, wanted.native, accept)
        except NotExpressible:
            return None
        return families.as_written(model.text_type, carried, rope)

    def readings(self, site: RopeSite, attempt: Attempt) -> tuple[LoaderReading, ...]:
        """Who reads the dict that carries it how."""
        key = (site.label, attempt)
        if key not in self._readings:
            wanted = self.wanted(site, attempt)
            params = self.params(site, attempt)
            assert params is not None  # who asks has seen that it can be written
            self._readings[key] = readings_of(
                self.model, wanted.rope, wanted.spectrum, params, self.target
            )
        return self._readings[key]

    def are_exact(
        self, names: tuple[str, ...], wanted: WantedSpectrum, params: forms.Params, *, even_so: bool
    ) -> bool:
        """Whether these loaders read a dict exactly, as a config or as GGUF keys."""
        model = self.model
        if model.container:
            from ropext.loaders import gguf  # late: no directory needs it

            form = gguf.carry(model.container, wanted.rope, wanted.spectrum, params)
            text = model.text_type
            return form is not None and gguf.exact_in(names, model.container, form, text, even_so)
        return loaders.exact_in(
            names, model.text_type, params, even_so=even_so, model_type=model.model_type
        )

    def row(self, recipe: Extend, method: str, chosen: str = "") -> MethodRow:
        """The two numbers of a method, and the form that would carry it; with the request's knobs
        where it is the chosen one."""
        if method == chosen:
            knobs = knobs_for(recipe, method)
        elif method in ("abf", "longrope"):
            needs = "--theta" if method == "abf" else "--pair-factors"
            return MethodRow(method, None, None, f"needs {needs}")
        else:
            knobs = scaling.find(method).knobs()
        attempt = attempt_of(recipe, method, knobs)
        if attempt not in self._rows:
            self._rows[attempt] = self._new_row(attempt)
        return self._rows[attempt]

    def _new_row(self, attempt: Attempt) -> MethodRow:
        method = attempt.method
        site = self.model.scaled_sites[0]
        try:
            wanted = self.wanted(site, attempt)
        except UsageError as error:
            return MethodRow(method, None, None, str(error))
        explanation = explain(site.rope, wanted.spectrum, self.target)
        if not wanted.moves and attempt.attention is None and not attempt.even_so:
            return MethodRow(method, explanation, None, "moves no pair here")
        params = self.params(site, attempt)
        if params is None:
            where = f"for {listed(attempt.for_loaders)}" if attempt.for_loaders else "here"
            return MethodRow(method, explanation, None, f"cannot be written exactly {where}")
        readings = newest(self.readings(site, attempt))
        return MethodRow(
            method,
            explanation,
            params["rope_type"],
            attention_factor=wanted.spectrum.attention_factor,
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
