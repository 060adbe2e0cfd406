"""The tables that stock transformers builds from configs: run as a script in a process without
ropext.

stdin: JSON lines of {"id", "config", "text_type", "task"}. stdout: one JSON line per config with
the inverse frequencies and attention factors of the text part's rotary modules, or the error.

With "tokens" it reads so many, and reports per layer how many numbers a DynamicCache then keeps.
With "turns" the answer is whether the output of each layer's attention moves with the positions. A
line of {"id", "keys"} asks for the keys that stock reads for this model type (stock_keys.py).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import stock_keys


class NoRopext:
    """Makes any import of ropext fail: the stock side must not use the code that it checks."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ropext":
            raise ImportError("the stock side must not import ropext")


def rotary_modules(model, text_type):
    """Yield (label, module) for every rotary embedding whose config is the text part's."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        for buffer in list(module._buffers):
            if not buffer.endswith("inv_freq") or buffer.endswith("original_inv_freq"):
                continue
            own = getattr(config, "model_type", None)
            if own is not None and own not in text_type:
                continue
            if own is None and ("vision" in name or "audio" in name or "visual" in name):
                continue
            if config is None and "Rotary" not in type(module).__name__:
                continue  # Voxtral's sinusoids of times, which are added and turn nothing
            yield name, buffer[: -len("inv_freq")].rstrip("_"), module


def theta_of(module):
    rope = getattr(getattr(module, "config", None), "rope_parameters", None)
    return rope.get("rope_theta") if isinstance(rope, dict) else None


def describe(model, text_type):
    sites = []
    for name, label, module in rotary_modules(model, text_type):
        prefix = f"{label}_" if label else ""
        sites.append(
            {
                "module": name,
                "label": label,
                "theta": theta_of(module),
                "inv_freq": getattr(module, prefix + "inv_freq").double().tolist(),
                "attention": float(getattr(module, prefix + "attention_scaling", 1.0)),
            }
        )
    scales = [
        float(m.scaling)
        for _, m in model.named_modules()
        if isinstance(getattr(m, "scaling", None), float) and hasattr(m, "layer_idx")
    ]
    return {"sites": sites, "scales": scales}


def build(request, folder):
    import transformers
    from accelerate import init_empty_weights

    Path(folder, "config.json").write_text(json.dumps(request["config"]), encoding="utf-8")
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, request["task"])
    tokens = request.get("tokens")
    if request.get("turns"):
        return {"turns": turning(auto.from_config(config).eval(), request["turns"])}
    if not tokens:
        with init_empty_weights(include_buffers=False):
            model = auto.from_config(config)
        return describe(model, request["text_type"])
    from transformers.initialization import no_init_weights  # transformers 4 has none

    with no_init_weights():  # the values do not matter, only how many are kept
        model = auto.from_config(config).eval()
    return describe(model, request["text_type"]) | {"cache": cached(model, tokens)}


def turning(model, tokens):
    """Return per layer whether its attention, given the same hidden states at other positions,
    changes its output.

    Uses of the positions other than the rotation stay unchanged.
    """
    import torch

    first, moved = {}, {}

    def enter(module, args, kwargs):
        if "args" not in (seen := first.setdefault(module, {})):
            seen["args"], seen["kwargs"] = args, kwargs
            return None
        if "position_embeddings" in kwargs:
            turned = {"position_embeddings": kwargs["position_embeddings"]}
            return seen["args"], seen["kwargs"] | turned
        states = {k: v for k, v in seen["kwargs"].items() if k == "hidden_states"}
        return (args if states else (seen["args"][0], *args[1:])), kwargs | states

    def leave(module, args, output):
        out = output[0] if isinstance(output, tuple) else output
        before = first[module].setdefault("out", out)
        if not out.isfinite().all():
            raise ValueError("its weights made at random overflow")
        layer = tuple(int(part) for part in names[module].split(".") if part.isdigit())
        far = (out - before).abs().max() > 1e-6 * before.abs().max()
        moved[layer] = moved.get(layer, False) or bool(far)

    for weights in model.parameters():  # far from nought: near it an attention weighs all alike
        weights.data += torch.randn_like(weights) / max(weights.shape[-1:], default=1) ** 0.5
    kinds = ("Attention", "MLA")
    names = {m: name for name, m in model.named_modules() if type(m).__name__.endswith(kinds)}
    names = {m: n for m, n in names.items() if any(map(str.isdigit, n))}
    inner = {part for module in names for part in module.modules() if part is not module}
    names = {m: n for m, n in names.items() if m not in inner}
    for module in names:
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
    ids = torch.arange(tokens)[None] % 8 + 3
    with torch.no_grad():
        for positions in (torch.arange(tokens), 3 * torch.arange(tokens)):
            rest = {"attention_mask": torch.ones_like(ids), "use_cache": False}
            model(input_ids=ids, position_ids=positions[None], **rest)
    return [turns for _, turns in sorted(moved.items())]


def cached(model, tokens):
    """Return how many numbers each layer keeps after one forward pass; shared tensors count
    once."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.arange(tokens)[None] % 8 + 3
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return [
        sum(t.numel() for t in {t.data_ptr(): t for t in tensors(layer)}.values())
        for layer in cache.layers
    ]


def tensors(layer):
    compressed = getattr(layer, "compressed_kv", {}).get("compressor")
    kept = [getattr(layer, "keys", None), getattr(layer, "values", None), compressed]
    return [t for t in kept if t is not None and t.numel()]


def main():
    sys.meta_path.insert(0, NoRopext())
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    from transformers.models.auto import modeling_auto as auto

    known = {
        "AutoModelForCausalLM": sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        "AutoModelForMaskedLM": sorted(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
        "AutoModel": sorted(auto.MODEL_MAPPING_NAMES),
    }
    print(json.dumps({"version": transformers.__version__, "types": known}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if "keys" in request:
                    config = transformers.CONFIG_MAPPING[request["keys"]]
                    answer = {"keys": stock_keys.position_keys(config)}
                else:
                    answer = build(request, folder)
            except Exception as error:  # every failure is reported under its type
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({"id": request["id"]} | answer), flush=True)


if __name__ == "__main__":
    main()
