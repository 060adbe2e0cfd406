"""What position scheme a model has: a checkpoint or a GGUF file, opened by its small files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropext import bundled, scaling
from ropext.checkpoint import Snapshot, open_snapshot, provenance
from ropext.checkpoint.tokenizer import NO_LIMIT
from ropext.errors import ConfigError, UsageError
from ropext.families import Model
from ropext.inputs import model_name
from ropext.options.door import public
from ropext.options.extend import Extend, resolve_target
from ropext.planning.carrier import Carrier
from ropext.rope import RopeSite, Spectrum
from ropext.schemes import read_positions

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from ropext.schemes.inspection import Unrotated


def open_given(
    model: object, revision: str | None = None, *, before_patch: bool = False
) -> Snapshot:
    """A model by its name; a model or a config in memory by what its config says."""
    if isinstance(model, str | PathLike):
        return open_model(model, revision=revision)
    if revision is not None:
        raise UsageError(f"revision {revision} is of a hub id, and this model is in memory")
    from ropext.inspecting.held import held_snapshot  # late: no command needs it

    return held_snapshot(model, before_patch=before_patch)


def open_model(model: str | PathLike[str], *, revision: str | None = None) -> Snapshot:
    """A checkpoint or a GGUF file, whichever the name is of."""
    model = model_name(model)
    if bundled.find_gguf(model) is not None:
        from ropext.gguf import open_gguf  # late: a directory needs none of it

        return open_gguf(model, revision=revision)
    return open_snapshot(model, revision=revision)


@contextmanager
def said_of(snapshot: Snapshot) -> Iterator[None]:
    """Let errors about what a snapshot says of positions name where it says so."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.sentence, snapshot.config_name) from None


@dataclass(frozen=True)
class Inspection:
    """What a model has, from its config files alone."""

    name: str
    carrier: Carrier
    target: int
    limits: dict[str, Any]
    extended: str = ""  # by what, as ropext.json says

    @property
    def model(self) -> Model:
        """The model as its config says it."""
        return self.carrier.model

    @property
    def main(self) -> RopeSite:
        """The embedding that an extension would scale."""
        return self.model.scaled_sites[0]

    def __repr__(self) -> str:
        return f"<Inspection of {self.name}: {self.model.context:,} tokens>"

    def spectra(self) -> dict[str, Spectrum]:
        """What three well-known methods would make of it, for the picture."""
        rope = self.main.rope
        known = scaling.well_known(self.main.rope, self.target)
        return {name: scaling.compose(rope, each, self.target) for name, each in known.items()}

    def to_json(self) -> dict[str, Any]:
        sites = []
        for site in self.model.sites:
            spectrum = site.rope.spectrum
            sites.append(
                {
                    "label": site.label,
                    "rope": asdict(site.rope),
                    "params": site.params,
                    "layers": site.layers,
                    "scaled": site.scaled,
                    "inv_freq": spectrum.inv_freq,
                    "wavelengths": spectrum.wavelengths,
                }
            )
        facts = asdict(self.model) | {"sites": sites}
        del facts["stock_sites"]  # the notes say where they differ
        del facts["described"]
        facts["container"] = self.carrier.architecture
        kv = {"kv_bytes_per_token": self.model.kv_bytes_per_token}
        head = {"model": self.name, "target": self.target, "extended": self.extended or None}
        return head | facts | kv | {"limits": self.limits}


@public()
def inspect(
    model: "str | Path | PreTrainedModel | PretrainedConfig | Mapping[str, Any]",
    *,
    factor: float | None = None,
    target: int | None = None,
    context: int | None = None,
    original_context: int | None = None,
    revision: str | None = None,
) -> "Inspection | Unrotated":
    """Return what position scheme a model has, and what follows from it.

    A model in memory, or a config, is seen by its config, as it computes now.
    """
    if factor is None and target is None:
        factor = 2.0  # from 4 on an untrained plan gets a warning
    request = Extend(
        factor=factor, target=target, context=context, original_context=original_context
    )
    snapshot = open_given(model, revision)
    if (positions := read_positions(snapshot.config)) is not None:
        from ropext.schemes.inspection import inspect_scheme  # late: no rotary model needs it

        return inspect_scheme(snapshot, positions, snapshot.name, _limits(snapshot))
    with said_of(snapshot):
        read = snapshot.read(context, original_context)
    carrier = snapshot.carries(read)
    record = provenance.record_in(snapshot)
    done = provenance.history(record) if record else ""
    wanted = resolve_target(request, read.context)
    return Inspection(snapshot.name, carrier, wanted, _limits(snapshot), done)


def _limits(snapshot: Snapshot) -> dict[str, Any]:
    """What besides the rotary embedding caps a sequence, or decides how it is extended."""
    longest = (snapshot.tokenizer_config or {}).get("model_max_length")
    return {
        "tokenizer": longest if isinstance(longest, int) and longest < NO_LIMIT else None,
        "generation": (snapshot.generation_config or {}).get("max_length"),
        "quantised": snapshot.quantisation,
    }
