"""The hook by which an optimizer is notified of a model's training passes.

Other modules import this module only when they make a hook. It imports torch._dynamo, which takes long, as torch does
itself when it makes the first optimizer; `import fogdist` alone should not do that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from fogdist.training.change_watch import forward_changes_parameters
from fogdist.training.passes import is_training_pass


class ForwardHook:
    """A forward hook, or forward pre-hook, that calls a method of an optimizer at each training pass.

    ::

        handle = model.register_forward_pre_hook(ForwardHook(self._fog_before_step))
        weakref.finalize(self, handle.remove).atexit = False

    `is_training_pass` defines training passes. The hook belongs to one model and one optimizer. It does not keep the
    optimizer alive, and a copy of it in a copied, pickled or saved model does nothing. ``torch.compile`` does not trace
    it and calls it as it is.

    Args:
        method: The bound method to call; None for a hook that does nothing.
        *arguments: Its arguments; it gets none of those of the pass.
    """

    def __init__(self, method: Callable[..., None] | None = None, *arguments: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = arguments

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: Module, *_: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None and is_training_pass(module):
            method(*self._arguments)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()


def hook_models(
    models: Sequence[Module],
    method: Callable[[int], None],
    register: Callable[[Module, ForwardHook], RemovableHandle] = Module.register_forward_hook,
) -> list[RemovableHandle]:
    """Has an optimizer's method called at each training pass of its models, until the optimizer is gone.

    Args:
        models: The models.
        method: The bound method; it gets the place of the model in the list.
        register: How a hook is registered with a model; by default it runs after the forward pass.

    Returns:
        The handles that remove the hooks.
    """
    handles = []
    for place, model in enumerate(models):
        handle = register(model, ForwardHook(method, place))
        weakref.finalize(method.__self__, handle.remove).atexit = False  # type: ignore[attr-defined]
        handles.append(handle)
    return handles


def register_before_forward(model: Module, hook: ForwardHook) -> RemovableHandle:
    """Registers a hook that sends parameters: before forward passes, or after them if they change parameters."""
    if forward_changes_parameters(model):
        return model.register_forward_hook(hook)
    return model.register_forward_pre_hook(hook)
