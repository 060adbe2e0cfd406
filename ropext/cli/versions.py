"""What `ropext --version` prints."""

import platform

from ropext.version import __version__

PACKAGES = ("torch", "transformers")
# All that ropext installs, as its pyproject.toml names them, and what reads their tokenizers.
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
    """Say the version of ropext and of what it runs on; verbose: of all that it installs, of Python
    and of the system."""
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
