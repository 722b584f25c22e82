"""What a training pass is."""

from __future__ import annotations

import torch
from torch.nn import Module


def is_training_pass(module: Module) -> bool:
    """Whether a forward pass of a module now is one that a step of its optimizer follows.

    It is in training mode with gradients enabled, outside of transforms of ``torch.func``.
    """
    return module.training and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()
