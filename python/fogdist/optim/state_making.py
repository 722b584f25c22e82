"""The step that a checkpoint makes on an optimizer that has no state yet, so that there is some to be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer


def only_makes_state(optimizer: Optimizer, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Returns whether a step is such a one: it moves nothing, and is no step of the training.

    ``torch.distributed.checkpoint.state_dict`` makes it on every optimizer without state, which an SGD without
    momentum always is, whether states are saved or loaded, and maybe on one rank only. It calls
    ``step(closure=None)`` with learning rates of 0, and with gradients of zeros for all parameters, which had
    none. Zeros alone do not tell: a training step has them too, at a learning rate of 0 in a warm-up. A
    training loop leaves the closure out.

    Args:
        optimizer: Whose step it is.
        arguments: Its positional arguments.
        options: Its keyword arguments.
    """
    if arguments or dict(options) != {"closure": None} or optimizer.state:
        return False
    if any(group.get("lr", 0) != 0 for group in optimizer.param_groups):
        return False
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(p.grad is not None and not p.grad.is_sparse and not p.grad.any() for p in trained)
