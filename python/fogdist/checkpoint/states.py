"""The state of a training on one rank, on its way into a piece of a checkpoint and back; and the mean of several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer

from fogdist.agreement import some
from fogdist.checkpoint.pieces import Piece, put_together, take_apart
from fogdist.checkpoint.together import together
from fogdist.context import Context
from fogdist.ddp import DecentralizedDataParallel
from fogdist.shards import is_sharded
from fogdist.training.algorithm import Algorithm
from fogdist.training.saved_state import set_number


def check_arguments(model: Module, optimizer: Optimizer | None) -> None:
    """Raises TypeError for arguments of other types, and for parameters that are DTensors."""
    if not isinstance(model, Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise TypeError(
                f"model must have ordinary parameters, got the DTensor {name!r}; save shards by "
                "torch.distributed.checkpoint, each replica under a name of its own: docs/howto/sharded_models.md"
            )


def settle(model: Module, optimizer: Optimizer | None) -> None:
    """Ends exchanges in flight, so that the state of the ranks is all that there is. Ranks call it together."""
    if isinstance(model, DecentralizedDataParallel):
        model.synchronize()
        model.pause()  # neighbors that have not called this yet go on without this rank
    if isinstance(optimizer, Algorithm):
        optimizer.settle()


def capture(
    model: Module, optimizer: Optimizer | None, extra: Any
) -> tuple[float, dict[str, Any], dict[str, Tensor]]:
    """Returns the weight of this rank's parameters in the mean, all that is no tensor, and the tensors by name.

    The tensors are those of the training itself.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {
        "model": take_apart(_module(model).state_dict(), "model", tensors),
        "extra": extra,
    }
    weight = 1.0
    if isinstance(model, DecentralizedDataParallel):
        rest["round"] = model.round
    if optimizer is not None:
        rest["optimizer"] = {
            "class": type(optimizer).__name__,
            "parameters": _names(model, optimizer),
            "state": take_apart(optimizer.state_dict(), "optimizer", tensors),
        }
    if isinstance(optimizer, Algorithm):
        weight = optimizer.own_weight
    return weight, rest, tensors


def of_all_ranks(rest: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
    """Returns what goes with the mean of all ranks, from what goes with the state of one rank."""
    changed = copy.deepcopy(dict(rest))
    if isinstance(optimizer, Algorithm) and "optimizer" in changed:
        set_number(changed["optimizer"]["state"], "shares", [])  # of the ranks that saved it
        weight = optimizer.mean_weight
        for name in [*optimizer.rank_numbers, *([] if weight is None else [weight])]:
            set_number(changed["optimizer"]["state"], name, optimizer.state_numbers[name])
    return changed


def means(
    context: Context,
    what: str,
    shapes: Mapping[str, Tensor],
    sources: Sequence[tuple[Piece, float]],
) -> dict[str, Tensor]:
    """Returns the means over the states of all ranks. Collective.

    Sums are in double, so the mean of equal numbers of a smaller type is that number. A state without a tensor does not
    count in the mean of that tensor.

    Args:
        context: The group.
        what: As of `together`.
        shapes: Of the tensors, as tensors, the same on all ranks; counts have no means.
        sources: This rank's part of the states, each with the weight of its model; all else has the weight 1.
    """
    found = {}
    for name, shape in shapes.items():
        if shape.is_floating_point() or shape.is_complex():
            flat = together(context, what, partial(_sum, sources, name, shape))
            context.backend.allreduce_named(flat, dist.ReduceOp.SUM).wait()
            found[name] = flat[:-1].div_(flat[-1].real).view(shape.shape).to(shape.dtype)
    return found


def check(
    model: Module,
    optimizer: Optimizer | None,
    shapes: Mapping[str, Tensor],
    rest: Mapping[str, Any],
    *,
    is_mean: bool,
) -> None:
    """Raises ValueError if a saved state, or the mean of several, is of another model or optimizer."""
    state = _module(model).state_dict()
    own = {f"model.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
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
    if is_mean and isinstance(optimizer, LBFGS):
        raise ValueError(
            "optimizer must not be an LBFGS to go on with another number of ranks: its history has no mean"
        )
    for place, (mine, its) in enumerate(zip(_names(model, optimizer), known["parameters"], strict=False)):
        if mine != its:
            raise ValueError(
                f"optimizer must have the parameters of the checkpoint in the same order; in group {place} it has "
                f"{some(mine)}, and the checkpoint has {some(its)}"
            )


def restore_model(model: Module, rest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Loads the saved values of a model, and the round of the wrapper."""
    state = _module(model).state_dict()  # it also has the versions of the model's layers
    state.update(put_together(rest["model"], tensors))
    _module(model).load_state_dict(state)
    if isinstance(model, DecentralizedDataParallel):
        model.round = rest.get("round", 0)


def _sum(sources: Sequence[tuple[Piece, float]], name: str, shape: Tensor) -> Tensor:
    """Returns the weighted sum of a tensor of the sources, and then the sum of its weights, in double."""
    kind = torch.complex128 if shape.is_complex() else torch.float64
    flat = torch.zeros(shape.numel() + 1, dtype=kind, device="cpu")
    for piece, weight in sources:
        if name in piece.shapes:
            alpha = weight if name.startswith("model.") else 1.0
            flat[:-1].add_(piece.tensors([name])[name].to(kind).reshape(-1), alpha=alpha)
            flat[-1] += alpha
    return flat


def _names(model: Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of an optimizer's parameters in each group."""
    names = {parameter: name for name, parameter in _module(model).named_parameters()}
    return [
        [names.get(parameter, "a parameter outside of the model") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def _module(model: Module) -> Module:
    """Returns the module in a wrapper, whose names the wrapper's do not have, and other models as they are."""
    return model.module if isinstance(model, DecentralizedDataParallel) else model


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
