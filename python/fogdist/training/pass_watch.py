"""Notices the training passes of a user's model without a hook on it, and marks them for profilers and the timeline.

`torch.jit.script`, `torch.export`, ``torch.compile(fullgraph=True)`` and copies carry a module's hooks along, or fail by them.
So this module steps in at the attribute by which `torch.nn.Module.compile` replaces a module's call. While a model is watched,
the attribute is a descriptor of the model's class, and only calls of this very model are told to anybody.

Other modules import this module only when they watch a model. It imports torch._dynamo, which takes long, as torch does
itself when it makes the first optimizer; `import fogdist` alone should not do that.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch._dynamo.decorators import skip
from torch.nn import Module

from fogdist.observe.timeline import timeline_end_activity, timeline_start_activity

# The moments of a training pass: before it, after it, and when it has raised an error.
When = Literal["before", "after", "failed"]

_ATTRIBUTE = "_compiled_call_impl"


def is_training_pass(module: Module) -> bool:
    """Returns whether a forward pass of the module now would be a training pass.

    A training pass runs in training mode with gradients enabled. Passes that a tool traces or exports, passes in transforms
    of ``torch.func``, and passes within a backward pass, as activation checkpointing makes them, are none.
    """
    return (
        module.training
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and torch._C._current_graph_task_id() == -1
    )


# The compiler looks into all that a compiled model calls.
_counts = torch.compiler.disable(is_training_pass)  # type: ignore[no-untyped-call]
_watched: weakref.WeakKeyDictionary[Module, _Calls] = weakref.WeakKeyDictionary()


class _Calls:
    """Calls one model, and tells those who watch it."""

    def __init__(self) -> None:
        self.watches: list[PassWatch] = []

    @skip  # the compiler sees the model's own call, not this one
    def __call__(self, model: Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        call = model._call_impl if compiled is None else compiled
        if not _counts(model):
            return call(*args, **kwargs)
        self._tell("before")
        try:
            result = call(*args, **kwargs)
        except BaseException:
            self._tell("failed")
            raise
        self._tell("after")
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _tell(self, when: When) -> None:
        for watch in list(self.watches):
            if watch.when == when:
                watch.tell()


class _CallOf:
    """The attribute of a class of models by which they are called: as it was, but for those that are watched."""

    @skip
    def __get__(self, model: Module | None, _: type[Module] | None = None) -> Callable[..., Any] | None:
        if model is None:
            return None
        compiled: Callable[..., Any] | None = vars(model).get(_ATTRIBUTE)
        calls = _watched.get(model)
        return compiled if calls is None else functools.partial(calls, model, compiled)

    def __set__(self, model: Module, value: Any) -> None:
        vars(model)[_ATTRIBUTE] = value

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # another process, which gets the class by its value, has it as it was


class PassWatch:
    """Calls a method of an optimizer at each training pass of a model, until one of them is gone or `remove` is called.

    `is_training_pass` defines training passes.

    Args:
        model: The model, which ``torch.compile`` may have wrapped.
        when: The moment in the pass.
        method: The bound method to call; its object is not kept alive.
        *arguments: Its arguments; it gets none of those of the pass.
    """

    def __init__(self, model: Module, when: When, method: Callable[..., None], *arguments: Any) -> None:
        model = getattr(model, "_orig_mod", model)
        self.when = when
        self._model = weakref.ref(model)
        self._method = weakref.WeakMethod(method)
        self._arguments = arguments
        self._kind = type(model)
        if not isinstance(vars(self._kind).get(_ATTRIBUTE), _CallOf):
            setattr(self._kind, _ATTRIBUTE, _CallOf())
        _watched.setdefault(model, _Calls()).watches.append(self)
        weakref.finalize(method.__self__, self.remove).atexit = False  # type: ignore[attr-defined]

    def tell(self) -> None:
        """Calls the method."""
        if (method := self._method()) is not None:
            method(*self._arguments)

    def remove(self) -> None:
        """Ends it. The class of the model is as before when none of its models is watched any more."""
        model = self._model()
        calls = None if model is None else _watched.get(model)
        if model is None or calls is None or self not in calls.watches:
            return
        calls.watches.remove(self)
        if not calls.watches:
            del _watched[model]
            if not any(isinstance(other, self._kind) for other in _watched):
                setattr(self._kind, _ATTRIBUTE, None)  # as `Module` has it


class PassMarks:
    """Marks training passes in the trace of ``torch.profiler`` and in the timeline.

    One range covers the forward pass and one the time from its end to the step. Operations of fog and the optimizer's
    step are in the trace in any case.

    Args:
        models: Their forward passes count in training mode with gradients enabled.
    """

    FORWARD = "fogdist.forward"
    GRADIENT = "fogdist.gradient"
    TRACK = "passes"

    def __init__(self, models: Sequence[Module]) -> None:
        self._open: torch.profiler.record_function | None = None
        self._shown = False  # in the timeline, too
        self._watches = [
            watch
            for model in models
            for watch in (
                PassWatch(model, "before", self._begin, self.FORWARD),
                PassWatch(model, "after", self._begin, self.GRADIENT),
                PassWatch(model, "failed", self.end),  # a range left open would take in all that follows
            )
        ]

    def remove(self) -> None:
        """Ends the range that is open and marks nothing more."""
        self.end()
        for watch in self._watches:
            watch.remove()

    def end(self) -> None:
        """Ends the range that is open, if any: a step calls this when its gradients are there."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
            if self._shown:
                timeline_end_activity(self.TRACK)

    def _begin(self, name: str) -> None:
        self.end()
        self._open = torch.profiler.record_function(name)
        self._open.__enter__()  # type: ignore[no-untyped-call]
        self._shown = timeline_start_activity(self.TRACK, name.removeprefix("fogdist."))
