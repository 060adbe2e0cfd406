"""Functions that Python hands over as methods, and the names by which they are found.

A name means one function. If its name already means another one, the function's name ends in a
digest of its behaviour, which is the same in every process.
"""

import re
import sys
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from types import CodeType, FunctionType, MethodType
from typing import Any

from ropext.scaling.rope import Rope

# A function of a Rope and a factor, before its result is checked.
Function = Callable[[Rope, float], Any]
_GIVEN = dict[str, Function]()


def name_of(function: Function) -> str:
    """Return the name (module:function) of a scaling function that Python hands over as a method.

    Keep the function under that name if its module has no attribute, or another one, by that name.
    """
    inner = innermost(function)
    module = re.sub(r"[^\w.]", "_", str(getattr(inner, "__module__", "") or "__main__"))
    attribute = re.sub(r"\W", "_", getattr(inner, "__name__", type(inner).__name__)).strip("_")
    name = f"{module}:{attribute}"
    digest = _digest(function)
    other = function_called(name)
    is_taken = other is not None and other is not function and _digest(other) != digest
    # Several functions may have no name of their own, and they may come in any order.
    if is_taken or attribute == "lambda" or inner is not function:
        name += f"_{digest}"
    if function_called(name) is not function:
        _GIVEN[name] = function
    return name


def function_called(name: str) -> Function | None:
    """Return the user's scaling function that a name means now: the attribute of its module, else
    the function that was handed over, else None.

    Nothing is imported.
    """
    module, _, attribute = name.partition(":")
    current: Function | None = getattr(sys.modules.get(module), attribute, None)
    if current is not None:
        return current
    return _GIVEN.get(name)


def innermost(function: Function) -> Function:
    """Return the user's scaling function to which partials bind arguments."""
    while isinstance(function, partial):
        function = function.func
    return function


def _digest(function: Function) -> str:
    """Return eight hex digits of the SHA-256 of the facts that decide the behaviour of a user's
    scaling function."""
    return sha256(_text(function, ()).encode()).hexdigest()[:8]


def _text(value: object, around: tuple[int, ...]) -> str:
    """Return the facts that decide the behaviour of a user's scaling function: its code, and the
    values that are bound to it.

    `around` are the ids of the values that contain this one; a value may contain itself.
    """
    if id(value) in around:
        return "itself"
    parts = _parts(value)
    if parts is None:
        return repr(value)
    around = (*around, id(value))
    return f"{type(value).__name__}({', '.join(_text(part, around) for part in parts)})"


def _parts(value: object) -> list[object] | None:
    """Return the parts of a value in a user's scaling function, for its digest. Return None if its
    repr describes it fully."""
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, _enclosed(value)]
    if isinstance(value, CodeType):
        return [value.co_code, value.co_names, value.co_freevars, value.co_consts]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        return [type(value), vars(value)]
    return None


def _enclosed(function: FunctionType) -> list[object]:
    """Return the values that a user's scaling function takes from the functions around it."""
    values = list[object]()
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            values.append(None)
    return values
