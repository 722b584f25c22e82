"""Facts about forward passes: whether one belongs to training, and whether it changes parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import Module


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


def forward_changes_parameters(model: nn.Module) -> bool:
    """Returns whether a forward pass changes parameters, as embeddings with `max_norm` rescale rows."""
    return any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        for module in model.modules()
    )
