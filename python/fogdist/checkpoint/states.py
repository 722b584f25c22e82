"""The state of a training on one rank, on its way into a piece of a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fogdist.agreement import some
from fogdist.checkpoint.pieces import State, put_together, take_apart
from fogdist.ddp import DecentralizedDataParallel
from fogdist.shards import is_sharded
from fogdist.training.algorithm import Algorithm


def check_arguments(model: Module, optimizer: Optimizer | None) -> None:
    """Raises TypeError for arguments of other types, and for parameters that are DTensors."""
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise TypeError(
                f"model must have ordinary parameters, got the DTensor {name!r}; torch.distributed.checkpoint saves "
                "shards itself"
            )


def settle(model: Module, optimizer: Optimizer | None) -> None:
    """Ends exchanges in flight, so that the state of the ranks is all that there is. Ranks call it together."""
    if isinstance(model, DecentralizedDataParallel):
        model.synchronize()
        model.pause()  # neighbors that have not called this yet go on without this rank
    if isinstance(optimizer, Algorithm):
        optimizer.settle()


def capture(model: Module, optimizer: Optimizer | None, extra: Any) -> State:
    """Returns the state of this rank; the tensors are those of the training itself."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {"model": take_apart(model.state_dict(), "model", tensors), "extra": extra}
    if isinstance(model, DecentralizedDataParallel):
        rest["round"] = model.round
    if optimizer is not None:
        rest["optimizer"] = {
            "class": type(optimizer).__name__,
            "parameters": _names(model, optimizer),
            "state": take_apart(optimizer.state_dict(), "optimizer", tensors),
        }
    return State(tensors, rest)


def check(
    model: Module, optimizer: Optimizer | None, shapes: Mapping[str, Tensor], rest: Mapping[str, Any]
) -> None:
    """Raises ValueError if a saved state is of another model or optimizer."""
    own = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    saved = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    differences = [
        f"{name.partition('.')[2]!r} is {_text(value)} and was saved as {_text(saved[name])}"
        for name, value in own.items()
        if name in saved and _text(value) != _text(saved[name])
    ]
    for one, other, where in ((own, saved, "in the model"), (saved, own, "in the checkpoint")):
        if names := [name.partition(".")[2] for name in sorted(one.keys() - other.keys())]:
            differences.append(f"only {where}: {some(names)}")
    if differences:
        raise ValueError(f"model must be that of the checkpoint, but {some(differences, '; ')}")
    if optimizer is None:
        return
    known = rest.get("optimizer")
    if known is None:
        raise ValueError("optimizer must be None for a checkpoint that was saved without an optimizer")
    name = type(optimizer).__name__
    if name != known["class"]:
        raise ValueError(f"optimizer must be a {known['class']}, as in the checkpoint, got a {name}")
    for place, (mine, its) in enumerate(zip(_names(model, optimizer), known["parameters"], strict=False)):
        if mine != its:
            raise ValueError(
                f"optimizer must have the parameters of the checkpoint in the same order; in group {place} it has "
                f"{some(mine)}, and the checkpoint has {some(its)}"
            )


def restore_optimizer(optimizer: Optimizer, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Loads the saved state of an optimizer."""
    optimizer.load_state_dict(put_together(rest["optimizer"]["state"], tensors))


def restore_model(model: Module, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Loads the saved values of a model, and the round of the wrapper."""
    state = model.state_dict()  # it also has the versions of the model's layers
    state.update(put_together(rest["model"], tensors))
    model.load_state_dict(state)
    if isinstance(model, DecentralizedDataParallel):
        model.round = rest.get("round", 0)


def _names(model: Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of an optimizer's parameters in each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        [names.get(parameter, "a parameter outside of the model") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
