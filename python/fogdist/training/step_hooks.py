"""Hooks that run exactly once before and after each step of an optimizer, even if its `step` calls another `step`.

torch wraps `step` of every class of which an optimizer is made so that it calls the hooks. They would run twice if the
`step` of a class calls that of its base class and an optimizer of the base class exists too.
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
    """Registers functions to call before and after each step of an optimizer, but not around steps within a step.

    Args:
        optimizer: The optimizer that makes the steps.
        before: Called with the positional and the keyword arguments of the step, the optimizer first. Returns None, or
            a tuple of both to replace them.
        after: Called after the step, unless it raises.

    Returns:
        The hooks' handles.
    """
    depth = 0

    def before_step(stepped: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal depth
        if depth > 0 and not _is_within_step(stepped, sys._getframe(1)):
            depth = 0  # an earlier step raised, so that its second hook was not called
        depth += 1
        return before(args, kwargs) if depth == 1 else None

    def after_step(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            after()

    return [optimizer.register_step_pre_hook(before_step), optimizer.register_step_post_hook(after_step)]


def replace_step(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> Any:
    """Makes a step in place of the optimizer's own, with the optimizer's hooks, and counted by schedulers.

    Args:
        optimizer: The optimizer, whose own step is not made.
        step: The step to make, called with the optimizer.

    Returns:
        The result of `step`.
    """
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        vars(optimizer)["_opt_called"] = True  # a scheduler's wrapper of `step` sets the same mark
    return Optimizer.profile_hook_step(step)(optimizer)


def _is_within_step(optimizer: Optimizer, caller: FrameType) -> bool:
    """Returns whether torch's wrapper of `step` that calls hooks is running for this optimizer already."""
    frame = caller.f_back
    while frame is not None:
        if frame.f_code is caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
