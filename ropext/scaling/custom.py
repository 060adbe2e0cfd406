"""A method that its user brings as `--method module:function`, or from Python as a function.

The function gets a Rope and the factor. It returns the wanted inverse frequencies and the attention
factor.
"""

import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ropext.base.errors import UsageError, class_name
from ropext.scaling.given import Function, function_called, innermost
from ropext.scaling.method import Method, Scaling
from ropext.scaling.rope import Rope, divisors

Result = TypeVar("Result")


def source_of(name: str) -> str | None:
    """Return the source of a user's scaling function (--method module:function). Return None if
    Python does not know it."""
    function = _called(name, lambda: _function(name))
    inner = innermost(function)
    try:
        source = inspect.getsource(inner)
    except (OSError, TypeError):
        return None
    while isinstance(function, partial):
        bound = f"# bound: {function.args!r} {function.keywords!r}"
        source += re.sub(r" at 0x[0-9a-fA-F]+", "", bound) + "\n"  # the same bytes in each process
        function = function.func
    return source


def method(name: str) -> Method:
    """Return the scaling method that a user's function (--method module:function) becomes."""
    function = _called(name, lambda: _function(name))

    def returned(rope: Rope, target: int) -> tuple[tuple[float, ...], float]:
        """Return the RoPE frequencies and the attention factor that the user's scaling function
        returns."""
        result = _called(name, lambda: function(rope, target / rope.context))
        return _called(name, lambda: _numbers(name, result))

    def scale(rope: Rope, target: int, knobs: object) -> Scaling:
        """Scale a rotary embedding to the RoPE frequencies of the user's function."""
        wanted, attention = returned(rope, target)
        now = rope.spectrum.inv_freq
        if not _fits(now, wanted) or not 0 < attention < math.inf:
            raise UsageError(
                f"--method {name} must return {len(now)} finite inverse frequencies (0 for a pair "
                f"that does not rotate) and an attention factor above 0; it returned "
                f"{str(wanted)[:60]}, {attention:g}"
            )
        if returned(rope, target) != (wanted, attention):
            raise UsageError(
                f"--method {name} returned other numbers when it was called again with the same "
                "arguments; it must depend on them alone, not on chance, time or earlier calls, or "
                "nothing can be verified"
            )
        factors = divisors(now, wanted)
        return Scaling(factors, attention / rope.attention_factor)

    summary = (innermost(function).__doc__ or "The user's own.").strip().partition("\n")[0]
    return Method(name, summary, "none", "longrope, or a simpler form that is exact", scale)


def _fits(now: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    """Return whether a user's method gives each RoPE pair a finite frequency, and 0 to each pair
    that does not turn."""
    if len(now) != len(wanted):
        return False
    for old, new in zip(now, wanted, strict=True):
        if not 0 <= new < math.inf or (new and not old):
            return False
    return True


def _function(name: str) -> Function:
    """Return the user's scaling function of the name module:function; import its module if
    necessary."""
    known = function_called(name)
    if known is not None:
        return known
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    sys.path.append(here)  # last: a folder here called `datasets` is not the library
    try:
        code: Function = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's own module imports it
        raise UsageError(
            f"--method {name}: there is no module {error.name}; looked in this folder ({here}) and "
            "among the installed ones: go to the folder of its file, or install it"
        ) from None
    finally:
        _remove_last(here)
    return code


def _remove_last(folder: str) -> None:
    """Remove the last entry of the folder of a user's method from sys.path: an earlier entry is the
    user's own."""
    for at in reversed(range(len(sys.path))):
        if sys.path[at] == folder:
            del sys.path[at]
            return


def _numbers(name: str, result: Any) -> tuple[tuple[float, ...], float]:
    """Return RoPE frequencies and attention factor from the result of a user's scaling function, as
    floats."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        count = f" of {len(result)}" if isinstance(result, tuple | list) else ""
        raise UsageError(
            f"--method {name} must return two things, the inverse frequencies and the attention "
            f"factor (1.0 for none); it returned {class_name(result)}{count}"
        )
    frequencies, attention = result
    return tuple(map(float, frequencies)), float(attention)


def _called(name: str, code: Callable[[], Result]) -> Result:
    """Run code of a user's scaling method; turn each exception into a UsageError that names the
    place."""
    try:
        return code()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        inside = place.filename != __file__ and not place.filename.startswith("<")
        where = f" ({os.path.basename(place.filename)}, line {place.lineno})" if inside else ""
        raise UsageError(f"--method {name}: {type(error).__name__}: {error}{where}") from error
