"""One transformers version, run as a script: makes random checkpoints and computes logits.

stdin: JSON lines; {"do": "make", "config", "directory"} writes weights that are large enough for a
wrong rotation to show, {"do": "logits", "directory", "tokens", "out"} saves the logits as .npy.
"""

import json
import sys
from pathlib import Path


def make(job):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(job["directory"])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(job["config"]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.5 / weight.shape[-1] ** 0.5)
            else:
                weight.fill_(0.0 if name.endswith("bias") or "gemma" in str(type(model)) else 1.0)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "config.json").write_text(json.dumps(job["config"]))
    return {}


def logits(job):
    import numpy
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["directory"], torch_dtype=torch.float32)
    with torch.no_grad():
        out = model.eval()(torch.tensor([job["tokens"]])).logits[0]
    numpy.save(job["out"], out.numpy())
    return {"std": float(out.std())}


def main():
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"make": make, "logits": logits}[job["do"]](job)
        except Exception as error:  # the parent asserts which errors are expected
            answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
