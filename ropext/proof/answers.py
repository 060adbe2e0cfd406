"""What the proof asks its child process, and what the child answers, as JSON.

The child runs without ropext: its files name these types for the type checker alone.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from ropext.base.jsontext import Json, JsonObject


class WantedNumbers(TypedDict):
    """The planned numbers of a site, which the child's small models take in place of the base's."""

    label: str
    inv_freq: Sequence[float]
    attention_factor: float
    softmax_factor: float
    bound: float  # largest relative difference that float32 explains


class SmallPass(TypedDict):
    """The forward pass that is wanted of a small model."""

    sites: list[WantedNumbers]
    context: int
    target: int


class DirectoryJob(TypedDict):
    """One directory to build, and what is asked about it."""

    directory: str
    text_path: list[str]
    last: int  # tokens that a model is to read that rotates nothing; 0: it rotates
    listen: bool  # note which distances its attention is told
    base: JsonObject | None  # the config before
    base_context: int
    forward: SmallPass | None
    describe: NotRequired[bool]  # what stock.py asks of a type, in place of all else


class ChildJob(TypedDict):
    """All that one child process is to do."""

    directories: list[DirectoryJob]
    tensors: bool
    trust_remote_code: bool
    room: int  # bytes of addresses


class BuiltRotary(TypedDict):
    """What one rotary embedding of a built model computes."""

    module: str
    label: str
    inv_freq: list[float]
    short_inv_freq: list[float] | None
    attention_factor: float
    params: JsonObject


class BuiltAttention(TypedDict):
    """What one attention module multiplies into the softmax, over its plain scale."""

    module: str
    softmax_factor: float


class BuiltNumbers(TypedDict):
    """What the modules of a model compute."""

    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]


class BuiltBase(TypedDict, total=False):
    """What stock builds from the base's config."""

    error: str | None
    changed: list[str] | None  # dotted keys that stock reads otherwise; None: not known
    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]


class ComparedTensors(TypedDict):
    """How the stored tensors fit the model that stock builds."""

    compared: int
    not_compared: int
    missing: list[str]
    unexpected: list[str]
    misshapen: list[tuple[str, list[int], list[int]]]  # stored shape, wanted shape
    unconverted: list[str]
    twice: tuple[str, list[str]] | None  # a parameter, the names that fill the same part of it


class PassAnswer(TypedDict, total=False):
    """What the forward pass of a small model showed."""

    reason: str | None  # why it was not run
    failed: str | None  # how the written config's failed where the base's did not
    layers: int  # of the small model ...
    of: int  # ... and of the whole one
    last: int  # largest position
    difference: float | None  # from the base's outputs with the planned numbers
    note: str | None  # why nothing was compared
    moved: float  # difference from the base's outputs as it is
    cost: JsonObject


class ReadAnswer(TypedDict, total=False):
    """How a model that rotates nothing read an input."""

    failed: str | None
    said: str
    told: dict[str, list[int]]  # distances at which each module is told something new
    read: int  # tokens


class Built(TypedDict, total=False):
    """What the child says of one directory; `error` alone where stock cannot build it."""

    directory: str
    transformers: str
    error: str | None
    cost: JsonObject
    model_class: str
    base: BuiltBase
    untied: list[str]
    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]
    forward: PassAnswer | None
    tensors: ComparedTensors | None
    last: ReadAnswer


class Turning(TypedDict):
    """What a small model showed of its layers."""

    unseen: str  # why there is none
    rotates: list[bool | None]  # whether each layer turns what it reads; None: it has no attention
    cancelled: bool  # a norm takes the temperature back


class TypeDescription(BuiltNumbers):
    """What stock shows of the types of a config."""

    types: dict[str, Json]
