"""Checks that fog_pg/_C.pyi names exactly the extension's functions, classes, methods, parameters and defaults.

The extension's side is the first line of each docstring, which pybind11 writes; the stub's side is the stub, run as
Python.
"""

from __future__ import annotations

import ast
import inspect
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import fog_pg

STUB = Path(fog_pg.__file__).parent / "_C.pyi"
# Names that every class or module has, or that pybind11 adds.
GIVEN = {"__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "_pybind11_conduit_v1_"}
GIVEN |= {"__qualname__", "__static_attributes__", "__firstlineno__"}

Signature = list[tuple[str, Any, Any]]


@pytest.fixture(scope="module")
def stub() -> dict[str, Any]:
    """Returns the stub's names; classes and functions are real ones, whose bodies do nothing."""
    names: dict[str, Any] = {"__name__": "fog_pg._C"}
    exec(compile(STUB.read_text(), str(STUB), "exec"), names)
    return names


@pytest.fixture(scope="module")
def extension() -> types.ModuleType:
    from fog_pg import _C

    return _C


def defined_names(body: list[ast.stmt]) -> set[str]:
    """Returns the names that these statements define, without imports."""
    names = set()
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign):
            assert isinstance(statement.target, ast.Name)
            names.add(statement.target.id)
    return names


def parameters(function: Any) -> Signature:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def bound_parameters(function: Any) -> Signature:
    """Returns the parameters of a bound function, from the first line of its docstring."""
    line = (function.__doc__ or "").splitlines()[0]
    names: dict[str, Any] = {}
    # Types are not evaluated, because only names, kinds and defaults are compared.
    exec(f"from __future__ import annotations\ndef {line}: pass", names)
    return parameters(names[line.partition("(")[0]])


def stub_classes(stub: dict[str, Any]) -> dict[str, type]:
    plan, group = stub["NeighborPlan"], stub["ProcessGroupFog"]
    classes = {"NeighborPlan": plan, "ProcessGroupFog": group, "ProcessGroupFog.Options": group.Options}
    return classes | {"Window": stub["Window"]}


def bound_class(extension: types.ModuleType, path: str) -> Any:
    found: Any = extension
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_module_names(stub: dict[str, Any], extension: types.ModuleType) -> None:
    in_stub = defined_names(ast.parse(STUB.read_text()).body)
    assert in_stub == {name for name in vars(extension) if not name.startswith("__")}
    annotations = typing.get_type_hints(types.SimpleNamespace(__annotations__=stub["__annotations__"]), stub)
    for name, kind in annotations.items():
        assert isinstance(getattr(extension, name), kind), name


def test_functions(stub: dict[str, Any], extension: types.ModuleType) -> None:
    functions = [name for name, value in vars(extension).items() if inspect.isroutine(value)]
    assert len(functions) > 0
    for name in functions:
        assert parameters(stub[name]) == bound_parameters(getattr(extension, name)), name
        typing.get_type_hints(stub[name], stub)  # checks that every name in the annotations exists


@pytest.mark.parametrize("path", ["NeighborPlan", "ProcessGroupFog", "ProcessGroupFog.Options", "Window"])
def test_class(stub: dict[str, Any], extension: types.ModuleType, path: str) -> None:
    ours, bound = stub_classes(stub)[path], bound_class(extension, path)
    names = set(vars(ours)) | set(inspect.get_annotations(ours))
    given = set(GIVEN)
    # the class has no constructor: other functions make its objects
    if not (bound.__init__.__doc__ or "").startswith("__init__("):
        given.add("__init__")
    assert names - given == set(vars(bound)) - given
    if bound.__bases__[0].__module__ != "pybind11_builtins":  # a stub cannot name such a base
        assert ours.__bases__ == bound.__bases__
    for name, member in vars(bound).items():
        if name in given or inspect.isclass(member):
            continue
        if isinstance(member, property):
            writable = name in inspect.get_annotations(ours)
            assert writable == (member.fset is not None), f"{name}: read-only on one side"
            assert writable or isinstance(vars(ours)[name], property), name
        else:
            assert parameters(getattr(ours, name)) == bound_parameters(getattr(bound, name)), name
            typing.get_type_hints(getattr(ours, name), stub)


def test_a_difference_would_be_seen() -> None:
    def bound() -> None:
        """bound(self: fog_pg._C.X, tensor: torch.Tensor, *, name: str = '', wait: bool = True) -> None"""

    def same(self: Any, tensor: Any, *, name: str = "", wait: bool = True) -> None: ...

    def default(self: Any, tensor: Any, *, name: str = "", wait: bool = False) -> None: ...

    def kind(self: Any, tensor: Any, name: str = "", *, wait: bool = True) -> None: ...

    assert parameters(same) == bound_parameters(bound)
    assert parameters(default) != bound_parameters(bound)
    assert parameters(kind) != bound_parameters(bound)
