"""Collectives and neighbor collectives in the call forms of every BlueFog version; objects as asyncddp sends them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

import fogdist
from fogdist.bluefog.deprecation import warn_once
from fogdist.context import handles

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_nonblocking",
    "allreduce_nonblocking_",
    "barrier",
    "broadcast_object",
    "broadcast_object_list",
    "hierarchical_neighbor_allreduce",
    "hierarchical_neighbor_allreduce_nonblocking",
    "neighbor_allgather",
    "neighbor_allgather_nonblocking",
    "neighbor_allreduce",
    "neighbor_allreduce_nonblocking",
]

Function = Callable[..., Any]


def _with_name_third(function: Function) -> Function:
    """BlueFog up to 0.2.1 had the name where `is_hierarchical_local` is now."""

    @functools.wraps(function)
    def call(
        tensor: Any,
        average: bool = True,
        is_hierarchical_local: bool | str | None = False,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        if is_hierarchical_local is None or isinstance(is_hierarchical_local, str):
            return function(tensor, average, False, is_hierarchical_local or name, **options)
        return function(tensor, average, is_hierarchical_local, name, **options)

    return call


def _with_weights_by_position(function: Function, renamed: Mapping[str, str]) -> Function:
    """BlueFog up to 0.2.4 took weights and name by position, and its keywords had other names; the first had `average`.

    Args:
        function: Takes all of them by keyword.
        renamed: The old keywords of sources and destinations, in this order, and what they are called now.
    """
    sources, destinations = renamed.values()
    order = ("self_weight", sources, destinations, "enable_topo_check", "name")

    @functools.wraps(function)
    def call(tensor: Any, *positional: Any, **options: Any) -> Any:
        if positional and isinstance(positional[0], bool):
            options["average"], *rest = positional
            positional = (None, None, *rest)
        if not options.pop("average", True):
            options |= {"self_weight": 1.0, sources: dict.fromkeys(fogdist.in_neighbor_ranks(), 1.0)}
            positional = (None, None, *positional[2:])
        if len(positional) > len(order):
            raise TypeError(f"{function.__name__}() takes at most {1 + len(order)} arguments by position")
        given = {name: value for name, value in zip(order, positional, strict=False) if value is not None}
        if isinstance(given.get(destinations), str):  # of BlueFog up to 0.2.1, which had no destinations
            given["name"] = given.pop(destinations)
        for old, new in renamed.items():
            if old in options:
                warn_once(f"{function.__name__}: {old!r} is called {new!r} now; the old name will go")
                if new in options or new in given:
                    raise TypeError(f"{old} and {new} must not both be given: they are the same")
                given[new] = options.pop(old)
        return function(tensor, **given, **options)

    return call


def _with_name_second(function: Function) -> Function:
    """BlueFog up to 0.2 took the name by position."""

    @functools.wraps(function)
    def call(tensor: Any, name: str | None = None, **options: Any) -> Any:
        return function(tensor, name=name, **options)

    return call


allreduce = _with_name_third(fogdist.allreduce)
allreduce_ = _with_name_third(fogdist.allreduce_)
allreduce_nonblocking = _with_name_third(fogdist.allreduce_nonblocking)
allreduce_nonblocking_ = _with_name_third(fogdist.allreduce_nonblocking_)

_RENAMED = {"neighbor_weights": "src_weights", "send_neighbors": "dst_weights"}
neighbor_allreduce = _with_weights_by_position(fogdist.neighbor_allreduce, _RENAMED)
neighbor_allreduce_nonblocking = _with_weights_by_position(fogdist.neighbor_allreduce_nonblocking, _RENAMED)

_RENAMED_MACHINES = {
    "neighbor_machine_weights": "src_machine_weights",
    "send_neighbor_machines": "dst_machine_weights",
}
hierarchical_neighbor_allreduce = _with_weights_by_position(
    fogdist.hierarchical_neighbor_allreduce, _RENAMED_MACHINES
)
hierarchical_neighbor_allreduce_nonblocking = _with_weights_by_position(
    fogdist.hierarchical_neighbor_allreduce_nonblocking, _RENAMED_MACHINES
)

neighbor_allgather = _with_name_second(fogdist.neighbor_allgather)
neighbor_allgather_nonblocking = _with_name_second(fogdist.neighbor_allgather_nonblocking)


def barrier(*, group: dist.ProcessGroup | None = None) -> None:
    """As `fogdist.barrier`, but first waits for the operations that this rank has in flight, windows' included.

    What was sent before it has arrived after it. Handles stay, and what went wrong `wait` tells. So a rank must not hold a
    mutex that an operation of another rank waits for.

    Args:
        group: As there; operations of all groups are waited for.

    Raises:
        TypeError: As there.
        ValueError: As there.
        RuntimeError: As there.
    """
    handles().settle()
    fogdist.barrier(group=group)


def broadcast_object(obj: Any, src: int = 0, device: Any = None, name: str | None = None) -> Any:
    """Returns one rank's object, pickled on the way. Collective.

    Unpickling runs what the root has put in: all ranks must trust each other, as in torch.distributed.

    Args:
        obj: Anything that can be pickled; what the others give does not count.
        src: The rank whose object all get.
        device: Not used: objects travel in host memory.
        name: Not used: calls are matched in their order.

    Raises:
        ValueError: `src` is not a rank, or before `init`.
        RuntimeError: torch.distributed.DistBackendError if a rank does not come.
    """
    objects = [obj]
    broadcast_object_list(objects, src)
    return objects[0]


def broadcast_object_list(
    object_list: list[Any], src: int | None = 0, device: Any = None, name: str | None = None
) -> None:
    """Replaces the objects of a list by those of one rank, in place; as `broadcast_object`.

    Args:
        object_list: Equally long on all ranks; of an empty one nothing is sent.
        src: The rank whose objects all get; None for rank 0.
        device: Not used.
        name: Not used.
    """
    src = 0 if src is None else src
    if not 0 <= src < fogdist.size():
        raise ValueError(f"src must be one of the ranks 0 to {fogdist.size() - 1}, got {src}")
    if object_list:
        dist.broadcast_object_list(object_list, src=src)
