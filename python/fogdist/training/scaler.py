"""Gradient scalers: makes them call `step` even after an overflow, because neighbors wait for the exchange in it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

# The attribute by which an optimizer asks a scaler to leave unscaling to it, and the attributes that the scaler then
# sets.
_SUPPORT = "_step_supports_amp_scaling"
_MARKS = ("grad_scale", "found_inf")


@torch.no_grad()
def unscale(optimizer: Optimizer, scale: Tensor) -> None:
    """Divides an optimizer's gradients by a gradient scaler's scale, which stays on its device."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scale.device.type == "cpu":
        for gradient in gradients:
            gradient.mul_(1.0 / float(scale))
        return
    # The arithmetic of torch's scaler, without waiting for the device.
    inverse = scale.double().reciprocal().float()
    of_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        of_device.setdefault(gradient.device, []).append(values)
    for device, values in of_device.items():
        torch._foreach_mul_(values, inverse.to(device, non_blocking=device.type != "cpu"))


class ScaledSteps:
    """Makes a ``torch.amp.GradScaler`` always call `step`. A step after an overflow does not change parameters.

    A scaler skips the step of a rank whose gradients overflowed, unless the optimizer declares that it handles
    overflows itself. Then the scaler stores scale and overflow in attributes of the optimizer, which this class removes
    during the step. So the rank skips its own update but still takes part in the exchange with its neighbors.
    Optimizers that declare it themselves, such as fused ones, are left as they are.

    Args:
        optimizer: The optimizer that makes the steps; not kept alive.
        is_on: False to leave scalers as they are; `hide` works all the same.
    """

    def __init__(self, optimizer: Optimizer, is_on: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._is_on = is_on and not getattr(optimizer, _SUPPORT, False)
        self._marks: dict[str, Any] = {}
        self._gradients: list[tuple[Tensor, Tensor]] = []
        if self._is_on:
            setattr(optimizer, _SUPPORT, True)

    def begin(self) -> None:
        """Call it before a step: unscales gradients, or hides them from the step if they overflowed."""
        self._marks, self._gradients = {}, []  # drops those of a step that raised
        optimizer = self._optimizer()
        if not self._is_on or optimizer is None:
            return
        members = vars(optimizer)
        self._marks = {name: members.pop(name) for name in _MARKS if name in members}
        scale, overflow = self._marks.get("grad_scale"), self._marks.get("found_inf")
        if overflow is not None and float(overflow) != 0:
            self.hide()
        elif scale is not None:
            unscale(optimizer, scale)

    def hide(self) -> None:
        """Hides the gradients until `end`: no optimizer updates a parameter without one."""
        optimizer = self._optimizer()
        assert optimizer is not None  # it makes a step
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None:
                self._gradients.append((parameter, parameter.grad))
                parameter.grad = None

    def end(self) -> None:
        """Call it after a step: restores the gradients and the scaler's attributes."""
        marks, self._marks = self._marks, {}
        gradients, self._gradients = self._gradients, []
        optimizer = self._optimizer()
        if optimizer is not None:
            vars(optimizer).update(marks)
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def remove(self) -> None:
        """Restores the optimizer as it was."""
        optimizer = self._optimizer()
        if self._is_on and optimizer is not None:
            vars(optimizer).pop(_SUPPORT, None)
        self._is_on = False
