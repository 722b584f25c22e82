"""What is done around an optimizer's steps, by hooks of them: once a step, however many `step` methods are in it.

torch puts hooks into the `step` of every class that it makes an optimizer of. So they are called twice where
the `step` of a class calls that of its base class, of which there is an optimizer too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def hook_steps(
    optimizer: Optimizer,
    before: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    after: Callable[[], None],
) -> list[RemovableHandle]:
    """Has functions called before and after each step of an optimizer, not around steps inside of a step.

    Args:
        optimizer: The optimizer that makes the steps.
        before: Given the positional and the keyword arguments of the step, the optimizer first; returns None
            or others, as a tuple of both.
        after: Not called for a step that raises.

    Returns:
        The hooks' handles.
    """
    depth = 0

    def before_step(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        if depth > 0 and not _is_within_step(stepped, sys._getframe(1)):
            depth = 0  # a step has raised, and its hook after it was not called
        depth += 1
        return before(args, kwargs) if depth == 1 else None

    def after_step(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            after()

    return [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]


def replace_step(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Any:
    """Makes a step in place of the optimizer's own: with its hooks around it, and counted by schedulers.

    Args:
        optimizer: The optimizer that does not make its step.
        step: Given the optimizer.

    Returns:
        What `step` returns.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        vars(optimizer)["_opt_called"] = True  # as a scheduler's own wrapper of `step` does
    return Optimizer.profile_hook_step(step)(optimizer)


def _is_within_step(optimizer: Optimizer, caller: FrameType) -> bool:
    """Whether torch's function around `step` that calls hooks is in progress for the optimizer already."""
    frame = caller.f_back
    while frame is not None:
        if frame.f_code is caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
