"""Compare the model that transformers built with the plan's promise, within bounds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ropext.base.errors import FilledTwice, ProofFailed, listed
from ropext.base.jsontext import Json, JsonObject
from ropext.scaling import forms
from ropext.scaling.rope import Positions, Site
from ropext.scaling.tables import starts

if TYPE_CHECKING:
    from ropext.verifying.proof.answers import Built, BuiltAttention, BuiltRotary, ReadAnswer

LISTED = 3  # names that a message shows of a longer list
# Relative to a forward pass's largest output. Both models compute in the same order: mostly
# bit-equal.
FORWARD_BOUND = 1e-4


@dataclass(frozen=True)
class ExpectedRotary:
    """The rotary embeddings that transformers must build from a config."""

    sites: tuple[Site, ...]
    factor: float = 1.0  # target over context: the larger, the more transformers' float32 is off

    def bound(self, site: Site) -> float:
        """Return the largest relative difference from a site's numbers that transformers' float32
        explains.

        Its llama3 ramp subtracts nearly equal numbers, which costs two bits more.
        """
        bound = max(1e-6, 1e-7 * self.factor) * forms.steepness(site.params)
        return 4 * bound if site.params.get("rope_type") == "llama3" else bound

    def only(self, sites: Iterable[Site]) -> "ExpectedRotary":
        """Return the rotary embeddings that transformers must build at these sites alone."""
        return replace(self, sites=tuple(sites))


@dataclass(frozen=True)
class Difference:
    """One compared number of a pair, or (pair = -1) one attention or softmax factor."""

    module: str
    what: str
    pair: int
    wanted: float
    found: float
    bound: float

    @property
    def error(self) -> float:
        """Return the relative difference of transformers' number from the plan's; infinity if
        transformers' is not finite, or if only the plan's is zero."""
        if self.wanted == self.found:
            return 0.0
        if not self.wanted or not math.isfinite(self.found):
            return math.inf
        return abs(self.found / self.wanted - 1)

    @property
    def excess(self) -> float:
        """Return the error of transformers' number in units of its bound."""
        return self.error / self.bound if self.bound else math.inf

    @property
    def is_beyond(self) -> bool:
        """Return whether transformers' number is no number, or differs by more than its bound."""
        return not self.error <= self.bound

    @property
    def place(self) -> str:
        """Return the module that transformers built and the name of its number."""
        return f"{self.module} {self.what}" + (f" of pair {self.pair}" if self.pair >= 0 else "")

    def __str__(self) -> str:
        """Return the sentence with transformers' number, the plan's, and the limit of their
        difference."""
        return (
            f"{self.place} is {self.found:.9g} in transformers, {self.wanted:.9g} in the plan "
            f"(relative error {self.error:.1e}, limit {self.bound:.0e})"
        )


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The counts of compared tensors, and the result of the forward pass."""

    transformers: str
    model_class: str
    tensors_compared: int
    tensors_not_compared: int
    forward: str = ""  # the result of the forward pass, or why it did not run
    base: str = ""  # how transformers' reading of the base's config compares with ropext's
    base_was_built: bool = False  # if not, `base` holds the reason
    # Dotted config keys that transformers reads otherwise than the base's; None: unknown base.
    changed: Sequence[str] | None = None
    untied: Sequence[str] = ()  # pairs of stored tensors that differ though the config ties them

    @property
    def sentence(self) -> str:
        """Return the sentence about the tensors that transformers loads into its model."""
        return (
            f"transformers {self.transformers} loads {self.tensors_compared} tensors in the shapes "
            f"of {self.model_class}"
        )

    def to_json(self) -> dict[str, Json]:
        """Return the section of ropext.json about the comparison with transformers."""
        out = {key: value for key, value in asdict(self).items() if key not in NOT_RECORDED}
        if not self.untied:
            del out["untied"]
        return out


# Fields of a proof outside the record: its list of edits has the changes.
NOT_RECORDED = ("base", "base_was_built", "changed")
# The fields of a rotary proof in ropext.json, in their order there.
RECORDED = (
    "transformers",
    "model_class",
    "rotary_modules",
    "attention_modules",
    "tensors_compared",
    "tensors_not_compared",
    "worst",
    "forward",
    "forward_agrees",
    "base",
)


@dataclass(frozen=True, kw_only=True)
class RotaryProof(Proof):
    """The proof of a model that rotates: also the counts of its modules, and the pair with the
    worst error."""

    rotary_modules: int
    attention_modules: int
    worst: Difference
    forward_agrees: bool = False  # it ran for base and result, and both gave the same

    @property
    def sentence(self) -> str:
        """Return the sentence about the modules and tensors that transformers builds as planned."""
        packed = self.tensors_not_compared
        return (
            f"transformers {self.transformers} builds {self.rotary_modules} rotary and "
            f"{self.attention_modules} attention modules and {self.tensors_compared} tensors as "
            f"planned (largest relative error {self.worst.error:.1e})"
            + (f"; {packed} packed tensors not compared" if packed else "")
        )

    def to_json(self) -> dict[str, Json]:
        """Return the section of ropext.json about the comparison with transformers."""
        out = asdict(self) | {"worst": asdict(self.worst) | {"error": self.worst.error}}
        return {key: out[key] for key in RECORDED}


def _rotary_differences(built: "BuiltRotary", site: Site, bound: float) -> list[Difference]:
    """Compare every number of a rotary module that transformers built with the plan's number."""
    module = built["module"]
    if site.label:
        module += f" ({site.label})"
    wanted = site.wanted
    numbers = built["inv_freq"]
    count = len(wanted.inv_freq)
    if len(numbers) != count:
        return [Difference(module, "number of pairs", -1, float(count), float(len(numbers)), 0.0)]
    short = built["short_inv_freq"] or numbers
    wanted_short = wanted.short_inv_freq or wanted.inv_freq
    out = []
    for what, planned, found in (
        ("frequency", wanted.inv_freq, numbers),
        ("short-input frequency", wanted_short, short),
    ):
        for pair, frequency in enumerate(planned):
            out.append(Difference(module, what, pair, frequency, found[pair], bound))
    attention = built["attention_factor"]
    out.append(
        Difference(module, "attention factor", -1, wanted.attention_factor, attention, bound)
    )
    return out


def _compare_rotary(built: "Built", promise: ExpectedRotary) -> list[Difference]:
    """Return the worst number of every rotary module that transformers built, compared with the
    site nearest to it.

    Raise ProofFailed if a module has no site, if there is no module, or if no module uses a scaled
    site.
    """
    sites = promise.sites
    worst = []
    seen = set()
    for module in built["rotary"]:
        candidates = [site for site in sites if module["label"] in ("", site.label)]
        if not candidates:
            raise ProofFailed(
                f"verification: {module['module']} has an embedding for {module['label']!r}; the "
                f"plan has only {', '.join(site.label or 'one' for site in sites)}"
            )
        nearest = _nearest_site(module, promise.only(candidates))
        seen.add(nearest.site.label)
        worst.append(nearest.difference)
    if not worst:
        raise ProofFailed(
            f"verification: transformers builds {built['model_class']} without a rotary embedding"
        )
    unseen = [site.label for site in sites if site.scaled and site.label not in seen]
    if unseen and not any(difference.is_beyond for difference in worst):
        raise ProofFailed(
            f"verification: no module of {built['model_class']} uses {', '.join(unseen)}"
        )
    return worst


def _compare_softmax(built: "Built", promise: ExpectedRotary) -> list[Difference]:
    """Return the difference of every attention module's softmax factor from the nearest site's.

    Raise ProofFailed if the plan's factor is not 1 and transformers built no module to compare.
    """
    worst = [_nearest_softmax_site(module, promise).difference for module in built["attention"]]
    if not worst and any(site.wanted.softmax_factor != 1 for site in promise.sites):
        raise ProofFailed("verification: no attention module has a softmax scale to compare")
    return worst


def compare_tensors(built: "Built", directory: str) -> tuple[int, int]:
    """Return how many stored tensors the child process compared with the model of transformers, and
    how many not.

    Raise ProofFailed if tensors are absent or do not fit the model, FilledTwice if two of them fill
    one parameter.
    """
    tensors = built["tensors"]
    if tensors is None:
        raise ProofFailed(f"verification: {directory} has no safetensors weights")
    misshapen = list[str]()
    for name, stored, wanted in tensors["misshapen"]:
        misshapen.append(f"{name} ({stored}, not {wanted})")
    for what, names in (
        ("has too few or too many tensors to build", tensors["unconverted"]),
        ("lacks tensors that the model has", tensors["missing"]),
        ("has tensors that the model lacks", tensors["unexpected"]),
        ("has tensors whose shape is not the model's", misshapen),
    ):
        if names:
            more = ""
            if len(names) > LISTED:
                more = f" and {len(names) - LISTED} more"
            raise ProofFailed(
                f"verification: {directory} {what}: {', '.join(names[:LISTED])}{more}"
            )
    if tensors["twice"]:
        parameter, names = tensors["twice"]
        shown = listed([name[:80] for name in names[:LISTED]])
        raise FilledTwice(
            f"the weight files hold {shown}, and transformers {built['transformers']} "
            f"loads each of them as {parameter}: engines disagree on which they load. Delete all "
            "but one"
        )
    return tensors["compared"], tensors["not_compared"]


def _compare_forward(built: "Built") -> tuple[str, bool]:
    """Return the result of the child's small models as a sentence, and whether their outputs agree.

    Raise ProofFailed if only the written config's model fails, or if the outputs differ.
    """
    run = built.get("forward")
    if run is None:
        return "", False
    if run["reason"] is not None:
        return f"forward not run: {run['reason']}", False
    small = (
        f"one forward pass of a small model ({run['layers']} of {run['of']} layers, random "
        f"weights) up to position {run['last']}"
    )
    blame = f"verification: with transformers {built['transformers']}, {small}"
    if run["failed"] is not None:
        raise ProofFailed(f"{blame} fails: {run['failed']}; the base's does not")
    if run["difference"] is None:
        return f"{small}: {run['note']}", False
    if not run["difference"] <= FORWARD_BOUND:
        raise ProofFailed(
            f"{blame} differs by {run['difference']:.1e} from the base with the planned "
            f"frequencies and factors (limit {FORWARD_BOUND:.0e}): the written config changes "
            "something else, too"
        )
    off = f"largest difference {run['difference']:.1e}"
    return f"{small} matches the base with the planned frequencies ({off})", True


@dataclass(frozen=True)
class _Match:
    """A module of the base and the site, as ropext read it, that it was compared with."""

    difference: Difference
    site: Site
    params: JsonObject  # the rope dict that transformers has for this module

    def __str__(self) -> str:
        """Return the sentence with the keys and the number that ropext and transformers read
        differently."""
        params = self.site.params
        far = self.difference
        keys = [k for k in params if self.params.get(k) is not None and self.params[k] != params[k]]
        said = [
            f"ropext read {key} as {params[key]}, transformers as {self.params[key]}"
            for key in keys
        ]
        numbers = f"{far.wanted:.9g} by ropext's reading, {far.found:.9g} in transformers"
        return "; ".join([*said, f"{far.place} is {numbers}"])


def _nearest_site(module: "BuiltRotary", promise: ExpectedRotary) -> _Match:
    """Return the match with the site whose worst number differs least from a rotary module that
    transformers built."""
    params = module.get("params", {})
    matches = []
    for site in promise.sites:
        differences = _rotary_differences(module, site, promise.bound(site))
        matches.append(_Match(max(differences, key=lambda d: d.excess), site, params))
    return min(matches, key=lambda match: match.difference.error)


def _nearest_softmax_site(module: "BuiltAttention", promise: ExpectedRotary) -> _Match:
    """Return the match with the site whose softmax factor is nearest to the factor of a built
    attention module."""
    name = module["module"]
    factor = module["softmax_factor"]
    matches = []
    for site in promise.sites:
        wanted = site.wanted.softmax_factor
        bound = promise.bound(site)
        difference = Difference(name, "softmax factor", -1, wanted, factor, bound)
        matches.append(_Match(difference, site, {}))
    return min(matches, key=lambda match: match.difference.error)


def _worst_match_of_base(built: "Built", promise: ExpectedRotary, read: ExpectedRotary) -> _Match:
    """Return the module of the base, as transformers builds it, that differs most from the reading.

    Each module is compared with the site that it matches in the written model. A module that no
    layer uses (as with Granite's list of thetas) may match any site: this applies if some module
    agrees with its site.
    """
    base = built["base"]
    strict = list[tuple[_Match, "BuiltRotary"]]()
    written = {(m["module"], m["label"]): m for m in built["rotary"]}
    for module in base["rotary"]:
        twin = written.get((module["module"], module["label"]), module)
        fits = []
        for site in promise.sites:
            differences = _rotary_differences(twin, site, promise.bound(site))
            if not any(difference.is_beyond for difference in differences):
                fits.append(site.label)
        fitting = read.only(site for site in read.sites if site.label in fits)
        strict.append((_nearest_site(module, fitting if fitting.sites else read), module))
    right = {nearest.site.label for nearest, _ in strict if not nearest.difference.is_beyond}
    matched = [_nearest_site(m, read) if n.site.label in right else n for n, m in strict]
    matched += [_nearest_softmax_site(module, read) for module in base["attention"]]
    return max(matched, key=lambda each: each.difference.excess)


def _compare_base(
    built: "Built",
    promise: ExpectedRotary,
    read: ExpectedRotary,
    known: ExpectedRotary,
) -> str:
    """Return the sentence that compares transformers' reading of the base's config with ropext's.

    If transformers reads it as `known`, which departs from the authors' code, the sentence only
    notes it. Raise ProofFailed for any other difference.
    """
    base = built["base"]
    if base["error"]:
        return f"not checked: transformers cannot build the base ({base['error']})"
    worst = _worst_match_of_base(built, promise, read)
    if not worst.difference.is_beyond:
        modules = f"{len(base['rotary'])} rotary and {len(base['attention'])} attention modules"
        error = f"largest relative error {worst.difference.error:.1e}"
        return f"ropext reads the base's config as transformers does: {modules} match ({error})"
    from_known = _worst_match_of_base(built, promise, known)
    if not from_known.difference.is_beyond:
        return f"transformers builds another base, a known difference: {worst}"
    raise ProofFailed(
        f"verification: transformers {built['transformers']} reads the base's config otherwise than"
        f" ropext: {from_known}. No plan for it can be right; please report this config.json"
    )


def check_built(built: "Built") -> None:
    """Raise ProofFailed with the child's error if transformers could not build a directory."""
    if built["error"]:
        raise ProofFailed(
            f"verification: transformers {built['transformers']} cannot build {built['directory']}:"
            f" {built['error']}"
        )


def compare(
    built: "Built",
    promise: ExpectedRotary,
    *,
    tensors: bool = True,
    read: ExpectedRotary | None = None,
    known: ExpectedRotary | None = None,
) -> RotaryProof:
    """Compare the model that transformers built with the promise, and its base with `read`, or with
    `known`.

    `read` is ropext's reading of the base, `known` the reading that transformers is known to have.
    Raise ProofFailed with the worst difference.
    """
    check_built(built)
    directory = built["directory"]
    version = built["transformers"]
    base = ""
    if read is not None:
        base = _compare_base(built, promise, read, known or read)
    differences = _compare_rotary(built, promise) + _compare_softmax(built, promise)
    worst = max(differences, key=lambda d: d.excess)
    if worst.is_beyond:
        raise ProofFailed(f"verification: with transformers {version}, {worst}")
    compared, not_compared = compare_tensors(built, directory) if tensors else (0, 0)
    forward, agrees = _compare_forward(built)
    return RotaryProof(
        transformers=version,
        model_class=built["model_class"],
        rotary_modules=len(built["rotary"]),
        attention_modules=len(built["attention"]),
        tensors_compared=compared,
        tensors_not_compared=not_compared,
        worst=worst,
        forward=forward,
        forward_agrees=agrees,
        base=base,
        base_was_built=not built["base"].get("error"),
        changed=built["base"].get("changed"),
        untied=built["untied"],
    )


def compare_distances(last: "ReadAnswer", positions: Positions) -> str:
    """Compare the distances at which transformers' attention receives a new value with the
    formula's.

    A distance may be off by one: float32 rounds at borders that are whole numbers. Return the
    sentence for the record; raise ProofFailed if a distance is off by more.
    """
    formulas = [starts(positions, causal=causal) for causal in (False, True)]
    wanted = [list(takewhile(lambda f: f < last["read"] - 1, f)) for f in formulas]
    for name, steps in last["distances"].items():
        pairs = [list(zip(steps, f, strict=True)) for f in wanted if len(f) == len(steps)]
        if not any(all(abs(a - b) <= 1 for a, b in pair) for pair in pairs):
            raise ProofFailed(
                f"verification: {name} tells tokens apart up to a distance of {steps[-1]}, which "
                f"is not what {positions.key} {positions.context} gives"
            )
    if not last["distances"]:
        raise ProofFailed(f"verification: no attention receives distances; {last['said']}")
    if last["read"] < positions.context:
        return f"; it distinguishes distances up to {last['read'] - 2}, as planned"
    ends = sorted({steps[-1] for steps in last["distances"].values()})
    return f"; tokens {' and '.join(map(str, ends))} or more apart look alike, as planned"
