"""Define the JSON types of the proof's questions to its child process, and of the answers.

The child runs without ropext: its files import these types for the type checker alone.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from ropext.base.jsontext import Json, JsonObject


class WantedNumbers(TypedDict):
    """The planned numbers of a site, which the child's small models use in place of the base's."""

    label: str
    inv_freq: Sequence[float]
    attention_factor: float
    softmax_factor: float
    bound: float  # largest relative difference that float32 explains


class DirectoryJob(TypedDict):
    """One directory to build, and the questions about it."""

    directory: str
    text_path: list[str]
    last: int  # tokens that a model without rotation has to read; 0: it rotates
    listen: bool  # note which distances its attention receives
    base: JsonObject | None  # the config before
    base_context: int
    sites: list[WantedNumbers]
    context: int
    target: int  # tokens that a small model has to read; 0: none is built
    describe: NotRequired[bool]  # describe the model type, and do nothing else


class ChildJob(TypedDict):
    """The whole job of one child process."""

    directories: list[DirectoryJob]
    tensors: bool
    trust_remote_code: bool
    room: int  # bytes of addresses


class BuiltRotary(TypedDict):
    """The numbers that one rotary embedding of a built model computes."""

    module: str
    label: str
    inv_freq: list[float]
    short_inv_freq: list[float] | None
    attention_factor: float
    params: JsonObject


class BuiltAttention(TypedDict):
    """The factor that one attention module multiplies into the softmax, relative to its plain
    scale."""

    module: str
    softmax_factor: float


class BuiltNumbers(TypedDict):
    """The numbers that the modules of a model compute."""

    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]


class BuiltBase(TypedDict, total=False):
    """The model that transformers builds from the base's config."""

    error: str | None
    changed: list[str] | None  # dotted keys that transformers reads differently; None: not known
    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]


class ComparedTensors(TypedDict):
    """How the stored tensors fit the model that transformers builds."""

    compared: int
    not_compared: int
    missing: list[str]
    unexpected: list[str]
    misshapen: list[tuple[str, list[int], list[int]]]  # stored shape, wanted shape
    unconverted: list[str]
    twice: tuple[str, list[str]] | None  # a parameter, the names that fill the same part of it


class PassAnswer(TypedDict, total=False):
    """The results of the forward pass of a small model."""

    reason: str | None  # why it did not run
    failed: str | None  # how the written config's pass failed if the base's did not
    layers: int  # layers of the small model ...
    of: int  # ... and of the whole one
    last: int  # largest position
    difference: float | None  # from the outputs of the base with the planned numbers
    note: str | None  # why nothing was compared
    moved: float  # difference from the outputs of the unchanged base


class ReadAnswer(TypedDict, total=False):
    """How a model that rotates nothing read an input."""

    failed: str | None
    said: str
    distances: dict[str, list[int]]  # by module: those at which it receives a new value
    read: int  # tokens


class Built(TypedDict, total=False):
    """The child's answer about one directory; `error` alone if transformers cannot build it."""

    directory: str
    transformers: str
    error: str | None
    model_class: str
    base: BuiltBase
    untied: list[str]
    rotary: list[BuiltRotary]
    attention: list[BuiltAttention]
    forward: PassAnswer | None
    tensors: ComparedTensors | None
    last: ReadAnswer


class Turning(TypedDict):
    """The facts that a small model showed about its layers."""

    unseen: str  # why there is no small model
    rotates: list[bool | None]  # whether each layer rotates its input; None: it has no attention
    cancelled: bool  # a norm takes the temperature back


class TypeDescription(BuiltNumbers):
    """The facts that transformers shows about the types of a config."""

    types: dict[str, Json]
