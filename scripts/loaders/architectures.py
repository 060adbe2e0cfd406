"""Prove rows of the GGUF table: llama.cpp's numbers from extended files of small models.

    python scripts/loaders/architectures.py --engine PYTHON --converter convert_hf_to_gguf.py
        [--work DIR] [ARCHITECTURE ...]

Each architecture gets random weights, wide and sharp, is converted by llama.cpp's own converter
without a scaling and extended in place by several options. The script prints the largest difference
of a log-probability in llama.cpp from stock transformers' forward pass with the planned spectrum,
over 4 times the window. It also prints the mean difference of the untouched file, which has to miss
by ten tolerances.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import kit
import numpy as np
from checkpoints import CONTEXT, FACTOR, VOCABULARY
from measure import SAME
from transformers.utils import logging

import ropext
from ropext.base.errors import NotExpressible
from ropext.base.jsontext import read_json, write_json

HERE = Path(__file__).parent
OPTIONS: dict[str, dict[str, Any]] = {
    "yarn": {"method": "yarn"},
    "pi": {"method": "pi"},
    "ntk": {"method": "ntk"},
    "llama3": {"method": "llama3"},
    "yarn, attention factor 1.25": {"method": "yarn", "attention_factor": 1.25},
    "yarn, betas 8 and 0.5": {"method": "yarn", "beta_fast": 8.0, "beta_slow": 0.5},
    "ntk, attention factor 1.2": {"method": "ntk", "attention_factor": 1.2},
}


def write_base(name: str, directory: Path, data: dict[str, Any]) -> None:
    """Random weights of an architecture's model type, and the config that its release has."""
    import torch
    import transformers

    own = data["architectures"][name]
    values = data["sizes"] | own["config"]
    if "text_config" in values:
        values["text_config"] = data["sizes"] | values["text_config"]
    config = transformers.AutoConfig.for_model(own["type"], **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kit._class_for(config).from_config(config, dtype="float32")
    kit.sharpen(model)
    with torch.no_grad():  # one layer in four rotates, and its norms undo wide weights
        for key, weight in model.named_parameters():
            if key.endswith(("q_norm.weight", "k_norm.weight")):
                weight += own.get("sharper", 0.0)
    model.save_pretrained(directory)
    saved = read_json(directory / "config.json") | own.get("released", {})
    write_json(directory / "config.json", saved)
    if own.get("transposed"):
        _transpose(directory / "model.safetensors")
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def _transpose(path: Path) -> None:
    """Give the experts the orientation that they have in releases, which the converter expects."""
    from safetensors.torch import load_file, save_file

    held = load_file(path)
    for key in held:
        if ".experts." in key:
            held[key] = held[key].transpose(1, 2).contiguous()
    save_file(held, path, metadata={"format": "pt"})


def by_stock(directory: Path, ids: np.ndarray, spectra: list[Any]) -> list[np.ndarray]:
    """Return log-probabilities of stock transformers with each spectrum in place of its own."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = kit._class_for(config).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    rotary = [
        (module, name)
        for module in model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name in ("inv_freq", "full_attention_inv_freq") and "ision" not in type(module).__name__
    ]
    tokens, found = torch.as_tensor(ids), []
    with torch.inference_mode():
        for spectrum in spectra:
            for module, name in rotary:
                own = getattr(module, name)
                setattr(module, name, torch.tensor(spectrum.inv_freq, dtype=own.dtype))
                scale = name.replace("inv_freq", "attention_scaling")
                assert hasattr(module, scale)
                setattr(module, scale, spectrum.attention_factor)
            logits = model(tokens[None]).logits[0].double()
            told = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            found.append(told.numpy())
    return found


def by_llama(engine: str, ids: Path, files: list[Path], room: Path) -> list[np.ndarray]:
    words = [engine, str(HERE / "read_llama_cpp.py"), str(ids), str(room / "out.npz")]
    subprocess.run([*words, *map(str, files)], check=True)
    with np.load(room / "out.npz") as told:
        for file in files:
            if f"{file}/error" in told:
                raise SystemExit(f"{file}: {told[f'{file}/error']}")
        return [told[str(file)] for file in files]


def prove(name: str, room: Path, chosen: argparse.Namespace, data: dict[str, Any]) -> str:
    """Return one line of the table."""
    from ropext.files import inspecting

    directory, base, ids = room / "base", room / "base.gguf", room / "ids.npy"
    if not base.exists():
        write_base(name, directory, data)
        converter = [chosen.engine, str(HERE / "convert_gguf.py"), str(chosen.converter)]
        subprocess.run([*converter, str(directory), str(base)], check=True, capture_output=True)
    np.save(ids, np.random.default_rng(0).integers(3, VOCABULARY, CONTEXT * FACTOR))
    files, spectra = [base], [inspecting.inspect(str(base)).main.rope.spectrum]
    for number, options in enumerate(OPTIONS.values()):
        file = room / f"{number}.gguf"
        file.unlink(missing_ok=True)
        try:
            done = ropext.extend(str(base), file, factor=FACTOR, **options)
        except NotExpressible:
            continue
        files.append(file)
        spectra.append(done.plan.main.wanted)
    llama, stock = (
        by_llama(chosen.engine, ids, files, room),
        by_stock(directory, np.load(ids), spectra),
    )
    gaps = [np.abs(a - b) for a, b in zip(llama, stock, strict=True)]
    missed = [np.abs(llama[0] - own).mean() for own in stock[1:]]
    assert min(missed) > 10 * SAME, (name, missed)
    worst, mean = max(gap.max() for gap in gaps[1:]), max(gap.mean() for gap in gaps[1:])
    assert mean < 2 * SAME, (name, gaps)
    plain = f"{gaps[0].max():.1e} ({gaps[0].mean():.1e})"
    return f"| {name} | {len(files) - 1} | {worst:.1e} ({mean:.1e}) | {plain} | {min(missed):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", required=True, help="a Python with llama-cpp-python")
    parser.add_argument("--converter", required=True, type=Path)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("architectures", nargs="*")
    chosen = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    data = json.loads((HERE / "architectures.json").read_text("utf-8"))
    columns = ("largest difference (mean)", "the same of the base file", "untouched, mean")
    print(f"| architecture | options carried of {len(OPTIONS)} |", " | ".join(columns), "|")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.architectures or data["architectures"]:
            room = (chosen.work or Path(folder)) / name
            room.mkdir(parents=True, exist_ok=True)
            print(prove(name, room, chosen, data), flush=True)


if __name__ == "__main__":
    main()
