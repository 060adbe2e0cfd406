"""Find the versions that `ropext --version` prints."""

import platform

from ropext.version import __version__

PACKAGES = ("torch", "transformers")
# All packages that ropext installs, as its pyproject.toml names them, and their tokenizers package.
EVERY_PACKAGE = (
    "torch",
    "transformers",
    "tokenizers",
    "accelerate",
    "peft",
    "safetensors",
    "gguf",
    "huggingface-hub",
    "datasets",
    "numpy",
    "matplotlib",
    "pydantic",
    "typer",
    "pyyaml",
)


def version_lines(verbose: bool) -> list[str]:
    """Return the lines that `ropext --version` prints: versions of ropext, torch and transformers.
    If `verbose`, add every package that ropext installs, Python and the system."""
    from importlib import metadata  # late: it costs as much as a third of typer

    lines = [f"ropext {__version__}"]
    packages = EVERY_PACKAGE if verbose else PACKAGES
    for package in packages:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} is not installed")
    if verbose:
        lines.append(f"Python {platform.python_version()}")
        lines.append(f"{platform.system()} {platform.release()} {platform.machine()}")
    return lines
