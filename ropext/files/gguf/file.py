"""One GGUF model as a snapshot."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from ropext.base import bundled
from ropext.files.checkpoint.snapshot import Snapshot
from ropext.files.gguf.geometry import FREQS, LONG, SHORT
from ropext.files.gguf.header import FILE_TYPES, TYPES, GgufHeader
from ropext.planning.gguf_carrier import GgufCarrier

RECORD = "ropext.record"  # the key that holds ropext.json
WHOLE = "ropext.file_sha256"  # SHA-256 of the whole file, with these 64 characters as zeros
FILLER = "ropext.filler"  # the key that moves the tensors to whole pages
PARTS = "split.tensors.count"
DIVISORS = frozenset((FREQS, LONG, SHORT))  # the tensors that an extension may write
TELLING_SIZE = 100_000_000  # bytes of a file; above this a plan warns of the copy's size


@dataclass(frozen=True)
class GgufFile(Snapshot):
    """A GGUF model as ropext found it: one file, or the parts of a split one."""

    architecture: str = field(default="", kw_only=True)  # decides which spectra it can store
    parts: tuple[GgufHeader, ...] = field(default=(), kw_only=True)
    dim: int = field(kw_only=True)  # channels of a head that rotate

    is_gguf: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        """Return the words for a GGUF file in messages, with its architecture."""
        return f"a GGUF of {self.architecture}"

    @property
    def head(self) -> GgufHeader:
        """The part that holds the model's metadata keys."""
        return self.parts[0]

    @property
    def quantisation(self) -> str | None:
        """The quantiser's name for the whole file, or the type of most of its bytes."""
        name = FILE_TYPES.get(self.head.whole("general.file_type", 0) or -1)
        if name is None:
            name = self._commonest_type()
        return f"{name} (GGUF)"

    def _commonest_type(self) -> str:
        """Return the type that most bytes of the tensors have."""
        sizes = dict[int, int]()
        for part in self.parts:
            for tensor in part.tensors:
                sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.size
        most = max(sizes, key=lambda kind: sizes[kind], default=-1)
        if most not in TYPES:
            return f"type {most}"
        name: str = TYPES[most][0]
        return name

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for part in self.parts for tensor in part.tensors)

    @property
    def file_name(self) -> str:
        """The name of an extended copy in a directory; Ollama names a blob by its hash, so it is
        model.gguf."""
        path = self.head.path
        if path.suffix.lower() == ".gguf":
            return f"{path.stem}.gguf"  # ropext recognizes a directory of a GGUF by this ending
        return "model.gguf"

    @property
    def place(self) -> str:
        """Return the GGUF file as commands get it: its path, also for a name of Ollama."""
        return str(self.head.path) if self.name.startswith(bundled.OLLAMA) else self.name

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder of the GGUF."""
        return self.head.path.parent / name

    def remarks(self) -> tuple[str, ...]:
        """Return the notes about a GGUF: a projector next to it, and the size of a large copy."""
        remarks = list[str]()
        projector = bundled.find_projector(self.name, self.directory)
        if projector is not None:
            remarks.append(
                f"[projector] {projector} beside it is a part for images or sound, which an "
                "extension leaves as it is; give it to the runner as before (llama-server --mmproj)"
            )
        size = sum(part.end for part in self.parts)
        if size > TELLING_SIZE:
            remarks.append(
                f"[disk] the copy has {size / 1e9:.1f} GB; `ollama create` makes a second one as "
                "large"
            )
        return tuple(remarks)

    def require_weights(self) -> None:
        """Do nothing: the weights are in the file."""

    def stands_for(self, directory: Snapshot) -> Snapshot:
        """Return the snapshot of a directory made of this GGUF, with the limits of its
        architecture."""
        # The directory has no GGUF keys any more, but their limits still decide the method.
        carries = partial(GgufCarrier, architecture=self.architecture)
        return replace(super().stands_for(directory), carries=carries)


def as_file(snapshot: Snapshot) -> GgufFile:
    """Return the snapshot as a GgufFile. The caller knows that it is one."""
    assert isinstance(snapshot, GgufFile)
    return snapshot
