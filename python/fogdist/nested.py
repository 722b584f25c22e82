"""States as state dicts are: containers within each other, with tensors and values of any types in them.

`plain` and `from_plain` bring a state to another process as tensors, strings, numbers and builtin containers, which torch
loads without running code (``weights_only=True``). An object becomes what `pickle` would write for it, the name of a
function and its arguments. Both sides know the same names: those that only make values, those of classes of values, and
what the user has registered by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import enum
import io
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The keys of the dicts that stand for an object, and for a function or class.
_OBJECT = "fog object"
_NAME = "fog name"
# The types of values that torch loads as they are, besides containers.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
# Functions and classes that only make values.
_HARMLESS = [
    *(bytearray, dict, float, frozenset, int, list, range, set, slice, str, tuple),
    *(Counter, OrderedDict, defaultdict, deque, io.BytesIO, np.dtype, np.ndarray),
    *(each.__reduce_ex__(4)[0] for each in (object(), np.float64(), np.empty(0))),  # what makes such objects
]
# The bases of classes whose objects `pickle` makes by a call. It makes others without their `__init__`.
_CALLED = (enum.Enum, tuple, Counter, OrderedDict, defaultdict, deque)


def replaced(state: Any, replace: Callable[[Any, str], Any], name: str = "") -> Any:
    """Returns a copy of a state in which values are replaced. Its containers have their types and attributes.

    Args:
        state: Dicts, lists and tuples, and subclasses of these, within each other, and any other values in them.
        replace: Gets a value and its name, and returns another one in its place. If it returns the value itself and that is
            a container, it is called for what is in it.
        name: The name of the state, such as "optimizer"; those of what is in it follow after a dot.
    """
    new = replace(state, name)
    if new is not state:
        return new
    if isinstance(state, dict):
        new = copy.copy(state)
        for key, item in state.items():
            new[key] = replaced(item, replace, f"{name}.{key}")
        return new
    if not isinstance(state, (list, tuple)):
        return state
    items = [replaced(item, replace, f"{name}.{place}") for place, item in enumerate(state)]
    if isinstance(state, list):
        new = copy.copy(state)
        new[:] = items
        return new
    return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)


def plain(state: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of a state that has only tensors, strings, numbers and builtin containers.

    Args:
        state: As of `replaced`.
        tensor: Returns what stands for a tensor.

    Raises:
        TypeError: It has an object that `from_plain` would refuse; the message names its place and class.
    """

    def take(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return tensor(value)
        kind = type(value)
        if kind in (*_PLAIN, list, tuple, torch.Size) or (kind is dict and _has_plain_keys(value)):
            return value
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return {_NAME: _known(_name_of(value), name)}
        try:
            reduce: Any = copyreg.dispatch_table.get(kind)
            reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
            if isinstance(reduced, str):
                raise TypeError("pickle knows it by its name only")
            function, *parts = reduced
            arguments, state, items, pairs = (*parts, None, None, None)[:4]
        except Exception as error:  # whatever a class raises
            raise TypeError(f"{name.lstrip('.')}: a {kind.__name__} cannot be copied: {error}") from error
        parts = [arguments, state, list(items or ()), list(pairs or ())]
        return {_OBJECT: [_known(_name_of(function), name, _CALLED), *replaced(parts, take, name)]}

    return replaced(state, take)


def from_plain(tree: Any) -> Any:
    """Returns the state of which `plain` has made a tree.

    Raises:
        TypeError: It has a name that is not known here.
    """

    def make(value: Any, _: str) -> Any:
        if type(value) is not dict or not {_OBJECT, _NAME}.intersection(value):
            return value
        if _NAME in value:
            return _found(value[_NAME])
        function, arguments, state, items, pairs = from_plain(value[_OBJECT])
        made = _found(function, _CALLED)(*arguments)
        if state is not None:
            _set_state(made, state)
        for item in items:
            made.append(item)
        for key, item in pairs:
            made[key] = item
        return made

    return replaced(tree, make)


def _has_plain_keys(value: dict[Any, Any]) -> bool:
    return all(type(key) in _PLAIN for key in value) and not {_OBJECT, _NAME}.intersection(value)


def _set_state(made: Any, state: Any) -> None:
    """Sets an object's attributes as `pickle` does."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    vars(made).update(attributes or {})
    for key, value in (slots or {}).items():
        setattr(made, key, value)


def _known(function: str, place: str, bases: tuple[type, ...] = (object,)) -> str:
    """Returns the name of a function or class, which the other process knows too."""
    try:
        _found(function, bases)
    except TypeError as error:
        raise TypeError(f"{place.lstrip('.')}: {error}") from None
    return function


def _found(name: str, bases: tuple[type, ...] = (object,)) -> Any:
    """Returns the function or class of a name; one of a class of values has one of the bases. It imports nothing."""
    known = {
        each[1] if isinstance(each, tuple) else _name_of(each): each[0] if isinstance(each, tuple) else each
        for each in [*_HARMLESS, *torch.serialization.get_safe_globals()]
    }
    if name in known:
        return known[name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = getattr(found, part, None)
        if _is_class_of_values(found) and issubclass(found, bases):
            return found
    raise TypeError(
        f"an object of {name} would run code of its own where it is loaded: if that may be, call "
        "torch.serialization.add_safe_globals with it on all ranks"
    )


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _is_class_of_values(found: object) -> bool:
    """Returns whether it is a class of named tuples, members of enumerations, dataclasses or containers."""
    return isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, dict, list, tuple))
    )
