"""Find the configs for `accelerate launch --config_file`: ddp, fsdp2, and fsdp2 with context
parallelism."""

from pathlib import Path

from ropext.base.errors import UsageError

NAMES = ("ddp", "fsdp2", "fsdp2_cp")


def config(name: str) -> Path:
    """Return the path of the config with which `accelerate launch` starts a training; refuse an
    unknown name."""
    if name not in NAMES:
        raise UsageError(f"no launch config {name!r}; there are {', '.join(NAMES)}")
    return Path(__file__).with_name(f"{name}.yaml")
