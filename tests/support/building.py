"""The requests to the stock side, and the answers that ropext expects from it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tiny

from ropext import families, scaling
from ropext.base.errors import NotExpressible
from ropext.families.config import census, defaults_of
from ropext.families.described import NO_FACTS
from ropext.families.table import family
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling import forms

STOCK = Path(__file__).with_name("stock.py")
FACTOR = 4
METHODS = ("pi", "ntk", "yarn", "by-parts", "longrope")
# The legacy base differs from the modern one in the keys that are overwritten, not in the
# mathematics.
LEGACY_METHODS = ("ntk", "yarn")


@dataclass
class Case:
    """One config and the spectra that stock must build from it."""

    model_type: str
    name: str
    config: dict
    wanted: dict = field(default_factory=dict)  # label -> Spectrum
    thetas: dict = field(default_factory=dict)  # label -> theta, for labels that are ours alone
    error: str = ""
    factor: float = 1.0  # the factor of the plan whose config this is

    @property
    def id(self):
        return f"{self.model_type} {self.name}"


def release(version):
    """Return the numbers of a version, to compare it with another."""
    return [int(number) for number in version.split(".")[:3]]


def knobs(method, pairs):
    made = scaling.find(method).knobs
    if method != "longrope":
        return made()
    # The second half slowed by up to 4: any vector without structure would do.
    return made(tuple(1 + 3 * i / pairs for i in range(pairs)))


def scaled(model, method, target):
    """Return label -> (wanted spectrum, stock dict) for the scaled sites; a longrope is as
    published ones."""
    out = {}
    for site in model.scaled_sites:
        context, attention = site.rope.context, None
        if method == "longrope":
            attention = forms.longrope_attention(target / context, context)
        pairs = knobs(method, site.rope.dim // 2)
        made = scaling.scale(site.rope, method, target, pairs, attention)
        wanted = scaling.compose(site.rope, made, target)
        native = scaling.native(site.rope, made)
        offers = forms.candidates(site.rope, wanted, target, native)
        params = next((p for p in offers if p["rope_type"] in model.forms), None)
        if params is None:
            raise NotExpressible(f"{method}: no form of this family carries it")
        out[site.label] = wanted, params
    return out


def base_case(model_type, name, config):
    case = Case(model_type, name, config)
    try:
        model = families.read(config)
    except Exception as error:  # told by the test of this type
        case.error = f"{type(error).__name__}: {error}"
        return case, None
    case.wanted = {site.label: site.rope.spectrum for site in model.sites}
    case.thetas = {site.label: site.params["rope_theta"] for site in model.sites}
    return case, model


def extended_case(base, model, method):
    """Return the base extended by a method; None if no form of this family carries it."""
    target = FACTOR * model.context
    try:
        plan = scaled(model, method, target)
    except NotExpressible:
        return None
    case = Case(base.model_type, f"{base.name} {method}", {})
    before = json.dumps(base.config)
    params = {label: made for label, (_, made) in plan.items()}
    case.config = families.write(base.config, model, params, target)
    if json.dumps(base.config) != before:
        case.error = "write() changed the dict that it was given"
    case.wanted = base.wanted | {label: wanted for label, (wanted, _) in plan.items()}
    case.thetas = base.thetas | {label: made["rope_theta"] for label, made in params.items()}
    return case


def stated_case(base, model):
    """Return the base with another stated length, by `--length-only`: the same spectrum is
    wanted."""
    made = make_plan(base.config, Extend(length_only=True, target=FACTOR * model.context))
    case = Case(base.model_type, f"{base.name} length-only", made.config, base.wanted)
    case.thetas = {site.label: site.params["rope_theta"] for site in made.sites}
    return case


def cases(model_type, with_head=True, text_apart=False):
    """Return every case of one model type.

    There are fewer for types without a language-model head, and for composites whose text part goes
    through all of them by itself.
    """
    text_type, path = tiny.text_part(model_type)
    methods = METHODS if with_head and not text_apart else ("yarn",)
    bases = [("modern", tiny.modern(text_type), methods)]
    if not path:
        bases.append(("bare", tiny.bare(text_type), ()))
        if with_head:
            bases.append(("legacy", tiny.legacy(text_type), LEGACY_METHODS))
    out = []
    for name, text, methods in bases:
        if text is None:
            continue
        base, model = base_case(model_type, name, tiny.wrapped(model_type, text))
        out.append(base)
        if model is not None:
            made = [extended_case(base, model, method) for method in methods]
            out += [case for case in made if case is not None]
    return out


class Stock:
    """The process that builds; started once, without any path to ropext."""

    def __init__(self, python=sys.executable, extra_path=""):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        env |= {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": extra_path} if extra_path else {})
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(STOCK)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            cwd="/",
        )
        head = json.loads(self.process.stdout.readline())
        self.version = head["version"]
        self.tasks = {}
        for task in ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModel"):
            for model_type in head["types"][task]:
                self.tasks.setdefault(model_type, task)

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def build(self, case, tokens=0, turns=0):
        """Return the tables that stock builds. With `tokens` also return the sizes that its cache
        keeps of so many tokens; with `turns` return only which layers rotate their input."""
        text_type, _ = tiny.text_part(case.model_type)
        request = {
            "id": case.id,
            "config": case.config,
            "text_type": [text_type],
            "task": self.tasks[case.model_type],
        }
        return self.ask(request | {"tokens": tokens, "turns": turns})

    def keys(self, model_type):
        """Return the keys that stock's code reads for a type, each with a value other than the
        default."""
        return self.ask({"id": model_type, "keys": model_type})["keys"]

    def has_head(self, model_type):
        return self.tasks[model_type] != "AutoModel"

    def close(self):
        self.process.stdin.close()
        self.process.wait()


# As Step-3.5 is released: one number for each layer, and one for a layer of further predictions.
STEP = {
    "layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 2],
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 5e6],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 0.5],
    "num_nextn_predict_layers": 1,
}


def spelled(model_type, keys):
    """Yield (key, config) for the bare config, and for each key set in it; the configs hold only
    keys that the class reads."""
    names = set(defaults_of(model_type, NO_FACTS).get("names", {}).values())
    known = {"model_type", "rope_parameters", "max_position_embeddings", *keys, *names}
    known |= {"intermediate_size", "moe_intermediate_size", "vocab_size", "hidden_size"}
    known |= tiny.SMALL.keys() - {"num_key_value_heads"} | tiny.SPECIAL.get(model_type, {}).keys()
    text = tiny.bare(model_type) or tiny.modern(model_type)
    text = {key: value for key, value in text.items() if key in known}
    short = {"sliding_window": 5, "attention_chunk_size": 5, "local_attention": 10}
    text |= {key: value for key, value in short.items() if key in keys}
    yield "", text
    for key, value in keys.items():
        if value is not None:
            yield key, text | {key: value}
    if model_type == "step3p5":
        yield "by layer", text | STEP


def cache_differences(model, kept, tokens):
    """Return sentences about layers whose stock cache keeps another amount.

    Between two steps it holds one token less than the window that a step sees.
    """
    wanted = [
        layer._replace(window=layer.window and layer.window - 1).kept(tokens)
        for layer in model.kv_layers or ()
    ]
    kept = [numbers for numbers in kept if numbers]
    return [] if kept == wanted else [f"stock's cache keeps {kept} by layer, we say {wanted}"]


def rotary_types():
    """Return every model type of the census whose text part is rotary."""
    return sorted(name for name in census() if tiny.text_part(name))


def bound(spectrum_case):
    """Return DESIGN's bound: 1e-7 * factor, at least 1e-6; four times that for llama3's ramp."""
    least = max(1e-6, 1e-7 * spectrum_case.factor)
    return least * (4 if "by-parts" in spectrum_case.name else 1)


def differences(case, answer):
    """Return sentences about the values that stock built otherwise; [] means as wanted."""
    if case.error:
        return [case.error]
    if "error" in answer:
        return [f"stock cannot build it: {answer['error']}"]
    out, seen = [], set()
    by_theta = {theta: label for label, theta in case.thetas.items()}
    row = family(tiny.text_part(case.model_type)[0], NO_FACTS)
    for built in answer["sites"]:
        label = built["label"]
        if label not in case.wanted:
            label = by_theta.get(built["theta"], "")
        if label not in case.wanted:
            out.append(f"stock has an embedding {built['label']!r} at {built['module']}")
            continue
        seen.add(label)
        out += _compare(case, label, built, compare_attention=not row.mscale_keys)
    out += [f"{label!r} is not in stock's model" for label in case.wanted.keys() - seen]
    return out


def _compare(case, label, built, compare_attention):
    wanted = case.wanted[label]
    if len(wanted.inv_freq) != len(built["inv_freq"]):
        return [f"{label!r}: {len(built['inv_freq'])} pairs, wanted {len(wanted.inv_freq)}"]
    out = []
    worst = max(
        abs(x - y) / y if y else abs(x)
        for x, y in zip(built["inv_freq"], wanted.inv_freq, strict=True)
    )
    if not worst <= bound(case):
        out.append(f"{label!r}: inverse frequencies off by {worst:.1e}")
    if compare_attention and abs(built["attention"] - wanted.attention_factor) > 1e-6:
        out.append(f"{label!r}: attention {built['attention']}, wanted {wanted.attention_factor}")
    return out
