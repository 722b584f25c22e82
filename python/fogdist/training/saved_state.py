"""An algorithm's state within the state dict of its optimizer, which plain optimizers can load as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fogdist.shards import local_of, sharded_as

# The prefix of the names under which a state dict has the algorithm's state, next to the optimizer's own entries.
_PREFIX = "fog_"
_NAME = f"{_PREFIX}algorithm"
# The entry for parameters without optimizer state; it is keyed by name and by the parameter's index. It is separate
# because an optimizer such as Adam initializes its state only for parameters whose state is empty.
_APART = f"{_PREFIX}apart"


def save_state(
    saved: dict[str, Any],
    optimizer: Optimizer,
    algorithm: str,
    pieces: Mapping[str, Mapping[Tensor, Tensor]],
    numbers: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns an optimizer's state dict with an algorithm's state in it.

    Args:
        saved: The optimizer's own state dict; it is not changed.
        optimizer: The optimizer.
        algorithm: The algorithm's name.
        pieces: The tensors that the algorithm keeps for each parameter, by name.
        numbers: The numbers that the algorithm keeps.
    """
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in saved["state"].items()}
    apart: dict[str, dict[str, Tensor]] = {}
    for place, (parameter, key) in enumerate(keys_of(saved, optimizer).items()):
        own = {name: sharded_as(parameter, of[parameter]) for name, of in pieces.items() if parameter in of}
        if saved["state"].get(key):
            state[key].update({_PREFIX + name: piece for name, piece in own.items()})
        elif own:
            state[key] = {}  # torch.distributed.checkpoint needs an entry for each parameter
            for name, piece in own.items():
                apart.setdefault(name, {})[str(place)] = piece
    groups = [dict(group) for group in saved["param_groups"]]
    groups[0].update({_PREFIX + name: value for name, value in numbers.items()})
    groups[0].update({_NAME: algorithm, **({_APART: apart} if apart else {})})
    return {**saved, "state": state, "param_groups": groups}


def load_state(
    state_dict: dict[str, Any], optimizer: Optimizer, algorithm: str, names: Sequence[str]
) -> tuple[dict[str, dict[Tensor, Tensor]], dict[str, Any]]:
    """Loads the optimizer's part of a state dict, and returns the algorithm's part.

    Args:
        state_dict: A state dict from `save_state` or of a plain optimizer.
        optimizer: The optimizer.
        algorithm: The algorithm's name.
        names: The names of the tensors that the algorithm keeps for each parameter.

    Returns:
        Copies of the tensors of each parameter that has any, by name; and the numbers.

    Raises:
        ValueError: The state dict is another algorithm's, or as `load_state_dict` of the optimizer.
    """
    groups = state_dict["param_groups"]
    numbers = {key: value for group in groups[:1] for key, value in group.items() if key.startswith(_PREFIX)}
    if numbers.pop(_NAME, algorithm) != algorithm:
        raise ValueError(
            f"state_dict must be of {algorithm} or of a plain optimizer, got one of {groups[0][_NAME]}"
        )
    apart = numbers.pop(_APART, {})
    state = {key: _without_prefix(value) for key, value in state_dict["state"].items()}
    # Parameters for which only the algorithm had state must have no entry in the optimizer's state.
    state = {key: value for key, value in state.items() if value or not isinstance(value, dict)}
    optimizer.load_state_dict(
        {**state_dict, "state": state, "param_groups": [_without_prefix(group) for group in groups]}
    )
    loaded: dict[str, dict[Tensor, Tensor]] = {}
    for place, (parameter, key) in enumerate(keys_of(state_dict, optimizer).items()):
        entries = state_dict["state"].get(key, {})
        for name in names:
            piece = entries.get(_PREFIX + name, apart.get(name, {}).get(str(place)))
            if piece is not None:
                loaded.setdefault(name, {})[parameter] = local_of(piece).clone()
    return loaded, {key.removeprefix(_PREFIX): value for key, value in numbers.items()}


def set_number(state_dict: Mapping[str, Any], name: str, value: Any) -> None:
    """Sets a number of an algorithm in a state dict from `save_state`; other state dicts stay as they are."""
    group = state_dict["param_groups"][0]
    if _PREFIX + name in group:
        group[_PREFIX + name] = value


def keys_of(state_dict: Mapping[str, Any], optimizer: Optimizer) -> dict[Tensor, Any]:
    """Returns the keys of an optimizer's parameters, in order, in its state dict."""
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    return dict(zip(order, keys, strict=True))


def _without_prefix(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries
    return {
        key: value for key, value in entries.items() if not (isinstance(key, str) and key.startswith(_PREFIX))
    }
