"""Write a kit for authors of loaders: small checkpoints in each form, and their right readings.

    python scripts/loaders/kit.py -o KIT [--family TYPE ...] [--force]

A family has one file of random weights, under which attention is sharp: log-probabilities differ by
tenths if a loader rotates otherwise. The spectra come from transcriptions of the papers, and the
log-probabilities from stock transformers, which agrees with them. check.py, which is part of the
kit, needs no other file of ropext.
"""

import argparse
import runpy
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bases import FAMILIES, SIZES, keys_of
from misreading import Config, misreadings

from ropext import families
from ropext.base import guard
from ropext.base.errors import NotExpressible, RopextError, UsageError, listed
from ropext.base.jsontext import read_json, write_json
from ropext.base.staging import Output, staged
from ropext.options.extend import Extend
from ropext.planning import make_plan
from ropext.scaling.forms import longrope_attention
from ropext.version import __version__

if TYPE_CHECKING:
    import torch

CONTEXT, FACTOR = SIZES["max_position_embeddings"], 4
# lengths of the inputs; the shorter is the start of the longer
LENGTHS = (CONTEXT, CONTEXT * FACTOR)
STRIDE = 8  # the kept log-probabilities are this many tokens apart
TOLERANCES = {"log_probability": 1e-2, "relative": 4e-6}
TELLING = 5e-2  # a misreading is listed if it moves a log-probability by at least this
EXPECTED, PLAIN = "expected.json", "plain"
HERE = Path(__file__).parent
# LongRoPE's own attention factor, which pair factors alone do not bring.
LONGROPE = {"method": "longrope", "attention_factor": longrope_attention(FACTOR, CONTEXT)}
# The form, and the options that make it. A fitted spectrum is a longrope.
FORMS: dict[str, dict[str, Any]] = {
    "linear": {"method": "pi"},
    "theta": {"method": "ntk"},
    "llama3": {"method": "llama3"},
    "yarn": {"method": "yarn"},
    "yarn-custom": {"method": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.3},
    "yarn-mscale": {"method": "yarn"},
    "longrope": LONGROPE,
    "longrope-custom": {"method": "longrope", "attention_factor": 1.25},
    "longrope-two-sets": LONGROPE,
}
# The transcription of each form's paper, and its arguments after the lengths.
FORMULAS: dict[str, tuple[Any, ...]] = {
    "linear": ("position_interpolation",),
    "theta": ("ntk_aware",),
    "llama3": ("llama3", 1.0, 4.0),
    "yarn": ("yarn",),
    "yarn-custom": ("yarn", 8.0, 2.0),
    "yarn-mscale": ("yarn",),
    "longrope": ("longrope",),
    "longrope-custom": ("longrope",),
    "longrope-two-sets": ("longrope",),
}
PAPERS = Path(__file__).parents[2] / "tests/support/transcriptions.py"
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}


def extended(plain: Config, form: str) -> Config:
    """Return a family's config in one form; raise RopextError if it cannot carry that."""
    model, options = families.read(plain), FORMS[form]
    rope = model.scaled_sites[0].rope
    if form == "yarn-mscale" and not rope.softmax_mscale:
        raise NotExpressible(f"the softmax of {model.text_type!r} reads no mscale_all_dim")
    if options["method"] == "longrope":
        long, short = factors(rope.dim // 2)
        options = options | {"pair_factors": long}
        if form == "longrope-two-sets":
            options["short_pair_factors"] = short
    config = make_plan(plain, Extend(factor=FACTOR, **options)).config
    if form == "yarn-mscale":
        config |= {key: config[key] | MSCALE for key in ("rope_scaling", "rope_parameters")}
    model = families.read(config)
    if model.stock_sites != model.sites:
        raise NotExpressible("stock transformers differs from its authors' code")
    return config


def spectra(plain: Config, form: str) -> list[dict[str, Any]]:
    """Return the spectrum of each rotary embedding of a family in one form, in float64, by the
    papers."""
    if not PAPERS.is_file():
        raise UsageError(f"the kit takes its spectra from {PAPERS}, which stands in a checkout")
    papers, own = runpy.run_path(str(PAPERS)), FORMS.get(form, {})
    out = []
    for site in families.read(plain).sites:
        d, b, (far, near) = site.rope.dim, site.rope.theta, factors(site.rope.dim // 2)
        made = {"layer_type": site.label, "inv_freq": papers["rope"](d, b), "short_inv_freq": None}
        made |= {"attention_factor": 1.0, "softmax_factor": 1.0}
        if site.scaled and form != PLAIN:
            name, *knobs = FORMULAS[form]
            knobs += [far] if name == "longrope" else []
            made["inv_freq"], attention = papers[name](d, b, *LENGTHS, *knobs)
            made["attention_factor"] = own.get("attention_factor", attention)
        if site.scaled and form == "longrope-two-sets":
            made["short_inv_freq"] = papers["longrope"](d, b, *LENGTHS, near)[0]
        if site.scaled and form == "yarn-mscale":
            made["attention_factor"] = papers["deepseek_attention"](FACTOR, *MSCALE.values())
            made["softmax_factor"] = papers["deepseek_softmax"](FACTOR, MSCALE["mscale_all_dim"])
        out.append(made)
    return out


def factors(pairs: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the long and the short factors of the kit's longropes; no closed form has them."""
    long, short = (tuple(1 + far * pair / pairs for pair in range(pairs)) for far in (5, 1))
    return long, short


def sharpen(model: "torch.nn.Module") -> None:
    """Draw weights under which far positions count: queries and keys are wide."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                wide = 3.0 if any(part in name for part in ("q_", "k_", "qkv", "query")) else 1.0
                weight.normal_(0.0, wide / weight.shape[-1] ** 0.5, generator=generator)


def write_base(
    family: str, directory: Path, sizes: Config = SIZES, own: Mapping[str, Any] | None = None
) -> Config:
    """Write a family's random weights and its config without scaling, which is returned: with the
    keys that releases on the hub have, not as transformers 5 saves it."""
    import torch
    import transformers

    values = keys_of(family, sizes, dict(own or {}))
    config = transformers.AutoConfig.for_model(family, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # sinks and the biases of routers stay as their class draws them
        model = _class_for(config).from_config(config, dtype="float32")
    sharpen(model)
    model.save_pretrained(directory)
    if family == "qwen3_5_moe":
        _fuse(directory / "model.safetensors")
    (directory / "generation_config.json").unlink(missing_ok=True)
    plain = _released(read_json(directory / "config.json"), values)
    write_json(directory / "config.json", plain)
    return plain


def _fuse(path: Path) -> None:
    """Lay a layer's experts into one tensor, as Qwen 3.5's releases have them; transformers 5 saves
    them one by one, which MLX-LM does not take."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, experts = load_file(path), dict[str, dict[str, list[torch.Tensor]]]()
    for name in sorted(key for key in tensors if ".experts." in key):
        place, _, kind = name.removesuffix(".weight").rsplit(".", 2)
        experts.setdefault(place, {}).setdefault(kind, []).append(tensors.pop(name))
    for place, parts in experts.items():
        both = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        tensors[f"{place}.gate_up_proj"] = torch.stack(both)
        tensors[f"{place}.down_proj"] = torch.stack(parts["down_proj"])
    save_file(tensors, path, {"format": "pt"})


def _released(saved: Config, values: Config) -> Config:
    if "text_config" in values:
        text = _released(saved["text_config"], values["text_config"])
        return saved | values | {"text_config": text}
    kept = {key: value for key, value in saved.items() if key != "rope_parameters"}
    # transformers 5 adds a null to a dict by layer types; releases have none.
    nested = "full_attention" in values.get("rope_parameters", ())
    return kept | ({} if nested else {"rope_scaling": None}) | values


def _class_for(config: Any) -> Any:
    """Return the auto class that has a config's model."""
    import transformers

    # For a composite, the first class is its text part alone.
    classes = (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM)
    return next(own for own in classes if type(config) in own._model_mapping)


def log_probabilities(
    directory: Path, config: Config, inputs: Iterable[Sequence[int]]
) -> "list[torch.Tensor]":
    """Return stock transformers' log-probability, by a config, of each token after the first of
    each input."""
    import torch
    import transformers

    read = transformers.AutoConfig.for_model(**config)
    model = _class_for(read).from_pretrained(
        directory, config=read, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    with torch.inference_mode():
        for ids in map(torch.as_tensor, inputs):
            logits = model(ids[None]).logits[0].double()
            found.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return found


def tokens() -> list[int]:
    """Return the text of all readings, by a generator that anybody can write down."""
    state, out = 1, list[int]()
    while len(out) < LENGTHS[-1]:
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        out.append(3 + (state >> 16) % (SIZES["vocab_size"] - 3))
    return out


def _read(directory: Path, config: Config) -> dict[str, list[float]]:
    """Return length -> the log-probabilities of every STRIDE-th token."""
    found = log_probabilities(directory, config, [tokens()[:length] for length in LENGTHS])
    kept = {length: own[STRIDE - 1 :: STRIDE] for length, own in zip(LENGTHS, found, strict=True)}
    # Four digits are the same with any number of threads.
    return {str(length): [round(x, 4) for x in own.tolist()] for length, own in kept.items()}


def _gap(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    return max(abs(a - b) for at in one for a, b in zip(one[at], other[at], strict=True))


def _write_family(family: str, place: Path) -> dict[str, Any]:
    """Write the files of one family; return the numbers of a right reading, by form."""
    plain, found = write_base(family, place), dict[str, Any]()
    for form in (PLAIN, *FORMS):
        try:
            config = plain if form == PLAIN else extended(plain, form)
        except RopextError:
            continue
        (place / form).mkdir()
        write_json(place / form / "config.json", config)
        right = _read(place, config)
        wrong = {} if form == PLAIN else misreadings(config, plain)
        read = {what: _read(place, other) for what, other in wrong.items()}
        found[form] = {
            "embeddings": spectra(plain, form),
            "log_probabilities": right,
            "misread": {what: own for what, own in read.items() if _gap(own, right) > TELLING},
        }
    return found


def write_kit(output: Path, wanted: Iterable[str] = (), *, force: bool = False) -> dict[str, Any]:
    """Write the kit; return its numbers."""
    import transformers
    from transformers.utils import logging

    chosen = list(dict.fromkeys(wanted)) or list(FAMILIES)
    for family in chosen:
        if family not in FAMILIES:
            has = listed([*FAMILIES])
            raise UsageError(f"--family {family} is not in the kit, which has {has}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with staged(Output(output, force)) as stage:
        place, found = stage.directory, dict[str, Any]()
        for family in chosen:
            found[family] = _write_family(family, place / family)
            print(family, flush=True)
        positions = {str(at): list(range(STRIDE, at, STRIDE)) for at in LENGTHS}
        versions = {"ropext": __version__, "transformers": transformers.__version__}
        about = {"versions": versions, "tolerances": TOLERANCES, "positions": positions}
        write_json(place / EXPECTED, about | {"families": found})
        write_json(place / "tokens.json", tokens())
        for name, source in (("README.md", "kit.md"), ("check.py", "check.py")):
            shutil.copyfile(HERE / source, place / name)
        write_json(place / guard.RECORD, {guard.FILES: guard.states(place)})
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    forms = {family: list(own) for family, own in found.items()}
    return {"output": str(output), "bytes": size, "versions": versions, "families": forms}


def main(words: Sequence[str]) -> None:
    """Write the kit as the command line asks, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--family", action="append", default=[], help="a model type [all]")
    parser.add_argument("--force", action="store_true", help="replace the output if it is a kit")
    chosen = parser.parse_args(words)
    try:
        made = write_kit(chosen.output, chosen.family, force=chosen.force)
    except RopextError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    forms = sum(map(len, made["families"].values()))
    size = f"{made['bytes'] / 1e6:.1f} MB"
    print(f"wrote {chosen.output}: {len(made['families'])} families, {forms} configs, {size}")
    print(f"{chosen.output / 'README.md'} says how a loader is compared with it")


if __name__ == "__main__":
    main(sys.argv[1:])
