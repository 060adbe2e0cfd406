"""Plant ten bugs, one at a time, in a small reader, and see that the conformance kit finds each.

    python scripts/loaders/kit.py -o KIT && python scripts/loaders/planted.py KIT

The reader is written from the papers, apart from ropext and from the kit. What it makes of a config
is put into stock transformers' model of the plain config, whose answers check.py then judges. The
reader without a bug must pass, and every bug must be found in a form that it concerns.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

# The bug -> forms of which it must spoil at least one.
BUGS = {
    "scaling ignored": {"linear", "llama3", "yarn", "longrope"},
    "theta lost": {"theta", "yarn"},
    "sliding layers scaled": {"linear", "yarn"},
    "factor applied twice": {"linear", "yarn"},
    "attention factor ignored": {"yarn-custom", "longrope-custom"},
    "betas ignored": {"yarn-custom"},
    "mscale_all_dim ignored": {"yarn-mscale"},
    "partial factor lost": {"theta", "linear"},
    "llama3's bounds swapped": {"llama3"},
    "longrope's set by n_ctx": {"longrope-two-sets"},
}


class Reader:
    """What a loader computes from config.json: frequencies and factors, for an input length."""

    def __init__(self, config: dict[str, Any], bug: str = "") -> None:
        config = config.get("text_config", config)
        self.config, self.bug = config, bug
        params = config.get("rope_parameters") or config.get("rope_scaling") or {}
        nested = not {"rope_type", "type"} & params.keys() and any(
            isinstance(own, dict) for own in params.values()
        )
        self.layers: dict[str, dict[str, Any]] = params if nested else {"": params}
        if not params and "rope_local_base_freq" in config:  # as Gemma 3's releases say it
            local = {"rope_theta": config["rope_local_base_freq"]}
            self.layers = {"full_attention": {}, "sliding_attention": local}

    def dim(self, params: dict[str, Any]) -> int:
        """Return the number of rotated channels."""
        heads, width = self.config["num_attention_heads"], self.config["hidden_size"]
        dim = self.config.get("head_dim") or width // heads
        if "qk_rope_head_dim" in self.config:
            return int(self.config["qk_rope_head_dim"])
        names = ("partial_rotary_factor", "rotary_pct")
        partial = next((c[n] for c in (self.config, params) for n in names if n in c), 1.0)
        return dim if self.bug == "partial factor lost" else int(dim * partial)

    def spectrum(self, layer: str, length: int) -> tuple[Tensor, float, float]:
        """Return (inverse frequencies, factor on cos and sin, factor on the softmax scale)."""
        params = dict(self.layers[layer])
        if layer.startswith("sliding") and self.bug == "sliding layers scaled":
            full = self.layers["full_attention"]
            params = full | {"rope_theta": params["rope_theta"]}
        theta = params.get("rope_theta") or self.config.get("rope_theta")
        theta = 10000.0 if self.bug == "theta lost" else theta
        dim, kind = self.dim(params), params.get("rope_type") or params.get("type") or "default"
        plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        if kind == "default" or self.bug == "scaling ignored":
            return plain, 1.0, 1.0
        factor = params["factor"] ** (2 if self.bug == "factor applied twice" else 1)
        context = params.get("original_max_position_embeddings") or self.config.get(
            "original_max_position_embeddings"
        )
        made: Callable[..., tuple[Tensor, float, float]] = getattr(self, f"_{kind}")
        return made(plain, params, factor, context, length)

    def _linear(self, plain: Tensor, p: Any, s: float, *_: Any) -> tuple[Tensor, float, float]:
        return plain / s, 1.0, 1.0

    def _llama3(
        self, plain: Tensor, p: dict[str, Any], s: float, context: int, _: int
    ) -> tuple[Tensor, float, float]:
        low, high = p["low_freq_factor"], p["high_freq_factor"]
        if self.bug == "llama3's bounds swapped":
            low, high = high, low
        turns = context * plain / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return plain / s * (1 - smooth) + plain * smooth, 1.0, 1.0

    def _yarn(
        self, plain: Tensor, p: dict[str, Any], s: float, context: int, _: int
    ) -> tuple[Tensor, float, float]:
        fast, slow = p.get("beta_fast") or 32, p.get("beta_slow") or 1
        if self.bug == "betas ignored":
            fast, slow = 32, 1
        dim = 2 * len(plain)
        theta = float(plain[1]) ** (-dim / 2)

        def index(turns: float) -> float:
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(index(fast)), 0), min(math.ceil(index(slow)), dim - 1)
        ramp = ((torch.arange(len(plain)) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
        default = 0.1 * math.log(s) + 1
        attention, softmax = p.get("attention_factor") or default, 1.0
        if p.get("mscale") and p.get("mscale_all_dim"):
            both = [0.1 * p[key] * math.log(s) + 1 for key in ("mscale", "mscale_all_dim")]
            attention, softmax = both[0] / both[1], both[1] ** 2
        if self.bug == "attention factor ignored":
            attention = default
        if self.bug == "mscale_all_dim ignored":
            softmax = 1.0
        return plain / s * ramp + plain * (1 - ramp), attention, softmax

    def _longrope(
        self, plain: Tensor, p: dict[str, Any], s: float, context: int, length: int
    ) -> tuple[Tensor, float, float]:
        long = length > context or self.bug == "longrope's set by n_ctx"
        factors = torch.tensor(p["long_factor" if long else "short_factor"], dtype=torch.float64)
        attention = p.get("attention_factor")
        if attention is None or self.bug == "attention factor ignored":
            attention = math.sqrt(1 + math.log(s) / math.log(context))
        if self.bug == "factor applied twice":
            factors = factors**2
        return plain / factors, attention, 1.0


class Loaded:
    """Stock transformers' model of a plain config, whose rotation is replaced by a reader's."""

    def __init__(self, kit: Path, family: str) -> None:
        with tempfile.TemporaryDirectory() as room:
            shutil.copy(kit / family / "plain" / "config.json", room)
            Path(room, "model.safetensors").symlink_to(
                (kit / family / "model.safetensors").resolve()
            )
            sees = "text_config" in json.loads(
                Path(room, "config.json").read_text(encoding="utf-8")
            )
            kind = "ImageTextToText" if sees else "CausalLM"
            self.model = (
                getattr(transformers, f"AutoModelFor{kind}")
                .from_pretrained(room, dtype=torch.float32, attn_implementation="eager")
                .eval()
            )
        self.scales = {
            module: module.scaling
            for module in self.model.modules()
            if "Attention" in type(module).__name__ and hasattr(module, "scaling")
        }

    def turn(self, reader: Reader, length: int) -> None:
        """Rotate as the reader says for inputs of a length."""
        factor = 1.0
        for at, module in self.model.named_modules():
            if "vision" in at:
                continue
            for name in [name for name in module._buffers if name.endswith("inv_freq")]:
                prefix = name.removesuffix("inv_freq")
                layer = prefix.removesuffix("_") if prefix else ""
                if "original" in layer:
                    continue
                layer = layer if layer in reader.layers else next(iter(reader.layers))
                inv_freq, attention, factor = reader.spectrum(layer, length)
                module.register_buffer(name, inv_freq.float(), persistent=False)
                setattr(module, f"{prefix}attention_scaling", attention)
        for module, scale in self.scales.items():
            module.scaling = scale * factor

    def log_probabilities(self, tokens: list[int], positions: list[int]) -> list[float]:
        """Return the log-probabilities of the tokens at the positions."""
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            rows = self.model(ids[None]).logits[0].double().log_softmax(-1)
        return [float(rows[at - 1, tokens[at]]) for at in positions]


def answers(kit: Path, models: dict[str, Loaded], bug: str, wanted: set[str]) -> dict[str, Any]:
    """Return the reader's answers, as check.py takes them."""
    tokens = json.loads((kit / "tokens.json").read_text())
    positions = json.loads((kit / "expected.json").read_text())["positions"]
    out: dict[str, Any] = {}
    for path in sorted(kit.glob("*/*/config.json")):
        family, form = path.parts[-3:-1]
        if family not in models or (wanted and form not in wanted):
            continue
        reader, found = Reader(json.loads(path.read_text()), bug), {}
        for length, places in positions.items():
            models[family].turn(reader, int(length))
            try:
                found[length] = models[family].log_probabilities(tokens[: int(length)], places)
            except RuntimeError:  # more channels than a head has: it says so by itself
                found[length] = [math.nan] * len(places)
        out.setdefault(family, {})[form] = {"log_probabilities": found}
    return out


def wrong(kit: Path, found: dict[str, Any]) -> list[str]:
    """Return the forms that the kit's own check.py finds wrong."""
    with tempfile.TemporaryDirectory() as room:
        path = Path(room) / "answers.json"
        path.write_text(json.dumps(found))
        command = [sys.executable, "-P", kit / "check.py", kit / "expected.json", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.endswith(": right")]
    assert (done.returncode != 0) == bool(lines), done.stderr
    return lines


# One family for each kind of reading; the reader without a bug is compared with all.
TRIED = ("llama", "gemma3_text", "stablelm", "deepseek_v3")


def main(kit: Path) -> int:
    """Print the findings; return 1 if a bug was missed or a right reading was blamed."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    models = {path.parent.name: Loaded(kit, path.parent.name) for path in kit.glob("*/plain")}
    false = wrong(kit, answers(kit, models, "", set()))
    print(f"no bug: {len(false)} readings blamed of {len(models)} families", *false, sep="\n  ")
    missed = 0
    tried = {family: models[family] for family in TRIED}
    for bug, concerned in BUGS.items():
        lines = wrong(kit, answers(kit, tried, bug, concerned))
        missed += not lines
        named = sum("it reads the form" in line for line in lines)
        print(f"{bug}: {'found' if lines else 'MISSED'} in {len(lines)} readings, named in {named}")
    return 1 if missed or false else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
