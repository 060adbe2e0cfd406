"""What stock transformers builds from configs: run as a script in a process without ropext.

stdin: JSON lines of {"id", "config", "text_type", "task"}; stdout: one JSON line per config with
the inverse frequencies and attention factors of the text part's rotary modules, or the error. With
"tokens" so many are read, and how many numbers a DynamicCache then keeps is told per layer. A
line of {"id", "keys"} asks for the keys that stock reads for this model type (stock_keys.py).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import stock_keys


class NoRopext:
    """Makes any import of ropext fail: the stock side must not lean on what it checks."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ropext":
            raise ImportError("the stock side must not import ropext")


def rotary_modules(model, text_type):
    """(label, module) for every rotary embedding whose config is the text part's."""
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

    Path(folder, "config.json").write_text(json.dumps(request["config"]))
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, request["task"])
    tokens = request.get("tokens")
    if not tokens:
        with init_empty_weights(include_buffers=False):
            model = auto.from_config(config)
        return describe(model, request["text_type"])
    from transformers.initialization import no_init_weights  # transformers 4 has none

    with no_init_weights():  # what is computed does not matter, only how much is kept
        model = auto.from_config(config).eval()
    return describe(model, request["text_type"]) | {"cache": cached(model, tokens)}


def cached(model, tokens):
    """How many numbers each layer keeps after one forward pass; shared tensors count once."""
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
                    answer = {"keys": stock_keys.keys_of(config)}
                else:
                    answer = build(request, folder)
            except Exception as error:  # every failure is reported under its type
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps({"id": request["id"]} | answer), flush=True)


if __name__ == "__main__":
    main()
