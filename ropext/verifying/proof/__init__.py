"""Build the written directory with stock transformers in a child process, and compare it with the
plan.

A fresh process that cannot import ropext (child.py) computes the numbers, and forward.py runs a
small model in it. The comparison (comparing.py) takes plain numbers, so that this process imports
neither torch nor transformers for it.
"""

import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ropext import families
from ropext.base.errors import ProofFailed, listed
from ropext.base.jsontext import Json, JsonObject, dump, read_object
from ropext.families import Model, stock
from ropext.families.config import Dict, entries, locate
from ropext.planning import ExtensionPlan
from ropext.scaling.rope import CONFIG, Positions
from ropext.verifying.proof.comparing import (
    LISTED,
    ExpectedRotary,
    Proof,
    RotaryProof,
    check_built,
    compare,
    compare_distances,
    compare_tensors,
)

if TYPE_CHECKING:
    from ropext.verifying.proof.answers import Built, ChildJob, DirectoryJob, WantedNumbers

__all__ = ["ExpectedRotary", "Proof", "RotaryProof", "compare"]

TIMEOUT = 1800.0  # seconds for one child process, of the largest mixtures of experts
LEAST_SECONDS = 600.0  # for each directory, even if its model is small
NO_ROTARY = ExpectedRotary(())
TASK = stock.ChildTask("the verification", "; --no-verify skips it")
# transformers builds at least so many, in all layers together, three times over
EXPERTS_A_SECOND = 20


def expected_rotary(model: Model, *, stock: bool = False) -> ExpectedRotary:
    """Return the rotary embeddings of a config as ropext reads it; with `stock`, as transformers is
    known to read it.

    The site with the largest ratio of context to original context sets the bound of all sites.
    """
    sites = model.stock_sites if stock else model.sites
    return ExpectedRotary(
        sites, max(site.rope.context / site.rope.original_context for site in sites)
    )


@dataclass(frozen=True)
class BuildRequest:
    """A directory for transformers to build, and the questions about it."""

    directory: Path
    text_path: Sequence[str] = ()  # to the part of the config that holds the rope dict
    base: JsonObject | None = None  # the config before; None if it is not at hand
    promise: ExpectedRotary = NO_ROTARY
    context: int = 0  # of the base
    target: int = 0  # tokens that a small model has to read; 0: none is built
    last: int = 0  # tokens that a model without rotation has to read ...
    listen: bool = False  # ... and whether to note which distances its attention receives

    @cached_property
    def read(self) -> Model | None:
        """Return the base of a small model as ropext reads its config. Return None if there is
        none."""
        if self.base is None or not self.target:
            return None
        return families.as_read(dict(self.base))

    def to_child(self) -> "DirectoryJob":
        """Return the request about one directory as JSON for the child process."""
        promise = self.promise
        sites: list[WantedNumbers] = []
        for site in promise.sites:  # the child's small models use these, not the base's
            wanted = site.wanted
            sites.append(
                {
                    "label": site.label,
                    "inv_freq": wanted.inv_freq,
                    "attention_factor": wanted.attention_factor,
                    "softmax_factor": wanted.softmax_factor,
                    "bound": promise.bound(site),
                }
            )
        return {
            "directory": os.path.abspath(self.directory),
            "text_path": list(self.text_path),
            "base": self.base,
            "base_context": self.read.context if self.read is not None else 0,
            "sites": sites,
            "context": self.context,
            "target": self.target,
            "last": self.last,
            "listen": self.listen,
        }


def build(
    requests: Sequence[BuildRequest],
    *,
    tensors: bool = True,
    trust_remote_code: bool = False,
    timeout: float | None = None,
) -> "list[Built]":
    """Build each directory with upstream transformers, in one child process for all of them.

    Return one answer for each directory. An answer holds `error` if the build failed.
    """
    directories = [request.directory for request in requests]
    limits = [_limits(request.directory, request.last) for request in requests]
    job: ChildJob = {
        "directories": [request.to_child() for request in requests],
        "tensors": tensors,
        "trust_remote_code": trust_remote_code,
        "room": max(room for _, room in limits),
    }
    if timeout is None:
        timeout = sum(seconds for seconds, _ in limits)
    return cast("list[Built]", stock.ask_child(job, directories, timeout, TASK))


def _limits(directory: Path, last: int) -> tuple[float, int]:
    """Return the seconds and the bytes of address space that the child process may use for one
    directory.

    Files are mapped, once for each reading. A model with a table of `last` positions may keep a
    mask of their square in each layer. A config's sizes raise the seconds up to TIMEOUT. They raise
    the memory for the built model up to the larger of LEAST_ROOM and 80 % of the free memory.
    """
    layers = 1
    experts = 1
    if (directory / CONFIG).is_file():
        for _, key, value in entries(Dict(read_object(directory / CONFIG))):
            if type(value) is int and re.search("layers?$|depth$", key):
                layers = max(layers, value)
            if type(value) is int and key.endswith("experts"):
                experts = max(experts, value)
    seconds = min(TIMEOUT, LEAST_SECONDS + layers * experts / EXPERTS_A_SECOND)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    built = stock.ROOM + last**2 * layers
    here = max(stock.LEAST_ROOM, int(stock.free_memory() * 0.8))
    return seconds, 3 * weights + min(built, here)


def require_buildable(config: JsonObject) -> None:
    """Raise ProofFailed unless transformers builds the model of a config, without weights, in a
    child process with a proof's limits.

    Call it before a config that a stranger may have written is built without limits.
    """
    with tempfile.TemporaryDirectory(prefix="ropext-plan-") as folder:
        (Path(folder) / "config.json").write_bytes(dump(dict(config)))
        (built,) = build([BuildRequest(Path(folder))], tensors=False)
    check_built(built)


def prove(request: BuildRequest, *, trust_remote_code: bool = False) -> RotaryProof:
    """Compare the model that transformers builds from a written directory with the promise: every
    module, every tensor, and one forward pass of a small model.

    Raise ProofFailed if anything differs.
    """
    (built,) = build([request], trust_remote_code=trust_remote_code)
    base = None
    known = None
    if request.read is not None:
        base = expected_rotary(request.read)
        known = expected_rotary(request.read, stock=True)
    try:
        return compare(built, request.promise, read=base, known=known)
    except ProofFailed as failed:
        failed.changed = built.get("base", {}).get("changed")
        raise


def prove_table(
    directory: Path,
    positions: Positions,
    *,
    base: JsonObject | None = None,
    trust_remote_code: bool = False,
) -> Proof:
    """Compare the model without rotation that transformers builds from a written directory with its
    planned positions.

    Every tensor must have its place and its shape. The first layer, or the whole model if its class
    needs that, reads an input up to the last position with its own weights. If no tensor holds the
    positions, the model must tell relative distances apart as transformers' formula does with this
    key. With the config of its `base`, the proof lists the keys that transformers reads
    differently, or holds the reason if transformers cannot build the base.
    """
    listen = not positions.tensors
    target = positions.context
    if listen:
        target += 2  # so that one more distance follows the last
    request = BuildRequest(directory, positions.path, base, last=target, listen=listen)
    (built,) = build([request], trust_remote_code=trust_remote_code)
    check_built(built)
    compared, packed = compare_tensors(built, str(directory))
    last = built["last"]
    if last["failed"] is not None:
        raise ProofFailed(
            f"verification: {built['model_class']} in transformers {built['transformers']} cannot "
            f"read {target} tokens: {last['failed']}"
        )
    forward = last["said"]
    if listen:
        forward += compare_distances(last, positions)
    reason = ""
    if error := built["base"].get("error"):
        reason = f"not checked: transformers cannot build the base ({error})"
    return Proof(
        transformers=built["transformers"],
        model_class=built["model_class"],
        tensors_compared=compared,
        tensors_not_compared=packed,
        forward=forward,
        base=reason,
        changed=built["base"].get("changed"),
        untied=built["untied"],
    )


def prove_plan(
    directory: Path,
    plan: ExtensionPlan,
    base: JsonObject,
    *,
    trust_remote_code: bool = False,
) -> dict[str, Json]:
    """Compare the model that transformers builds from a written directory with a plan. Return the
    proof's entries for the record.

    Raise ProofFailed also if transformers reads a key differently from the base's and no extension
    changes that key.
    """
    growth = plan.growth
    if growth is not None:
        own_code = trust_remote_code
        return prove_table(directory, growth.extended, trust_remote_code=own_code).to_json()
    text_path = locate(dict(plan.config)).path
    promise = ExpectedRotary(plan.sites, plan.factor)
    request = BuildRequest(directory, text_path, base, promise, plan.context, plan.target)
    proved = prove(request, trust_remote_code=trust_remote_code)
    others = families.unexpected_changes(families.as_read(dict(base)), proved.changed or ())
    if others:
        raise ProofFailed(
            f"verification: transformers {proved.transformers} reads {listed(others[:LISTED])} "
            "otherwise than in the base, and no extension changes that"
        )
    return proved.to_json()
