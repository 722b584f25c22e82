"""The table of the names of BlueFog 0.1 and 0.2 that were renamed.

`fogdist` and `fogdist.topology` look up names here that they do not have. An old name still works as it did, including
its order of arguments, and issues a DeprecationWarning with the new name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fogdist.removed import missing

# Called with the new function and then the arguments of the old one.
Adapter = Callable[..., Any]


def _win_sync(
    win_update: Adapter,
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
) -> Any:
    return win_update(name, self_weight, neighbor_weights, reset, clone, require_mutex=reset)


def _win_write(
    win_write: Adapter,
    tensor: Any,
    name: str,
    dst_weights: Mapping[int, float] | None = None,
    require_mutex: bool = False,
) -> Any:
    return win_write(tensor, name, dst_weights=dst_weights, require_mutex=require_mutex)


def _allreduce(allreduce: Adapter, tensor: Any, average: bool = True, name: str | None = None) -> Any:
    return allreduce(tensor, average, name=name)


def _neighbor_allgather(neighbor_allgather: Adapter, tensor: Any, name: str | None = None) -> Any:
    return neighbor_allgather(tensor, name=name)


def _neighbor_allreduce(
    neighbor_allreduce: Adapter,
    tensor: Any,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    name: str | None = None,
) -> Any:
    return neighbor_allreduce(tensor, self_weight=self_weight, src_weights=neighbor_weights, name=name)


# Old name: new name, and the adapter for the old arguments if they differ.
RENAMED: dict[str, tuple[str, Adapter | None]] = {
    "win_sync": ("win_update", _win_sync),
    "win_sync_then_collect": ("win_update_then_collect", None),
    "win_put_async": ("win_put_nonblocking", _win_write),
    "win_accumulate_async": ("win_accumulate_nonblocking", _win_write),
    "win_get_async": ("win_get_nonblocking", None),
    "allreduce_async": ("allreduce_nonblocking", _allreduce),
    "allreduce_async_": ("allreduce_nonblocking_", _allreduce),
    "broadcast_async": ("broadcast_nonblocking", None),
    "broadcast_async_": ("broadcast_nonblocking_", None),
    "allgather_async": ("allgather_nonblocking", None),
    "neighbor_allgather_async": ("neighbor_allgather_nonblocking", _neighbor_allgather),
    "neighbor_allreduce_async": ("neighbor_allreduce_nonblocking", _neighbor_allreduce),
    "PowerTwoRingGraph": ("ExponentialTwoGraph", None),
    "PowerGraph": ("ExponentialGraph", None),
    "BiRingGraph": ("RingGraph", None),
    "GetWeights": ("GetRecvWeights", None),
    "GetDynamicSendRecvRanks": ("GetDynamicOnePeerSendRecvRanks", None),
}


def find(name: str, module: str, names: Mapping[str, Any]) -> Any:
    """Returns the replacement of an old name in a module, and warns.

    Args:
        name: The name that the module does not have.
        module: Name of the module, which must call this from its ``__getattr__``.
        names: The names of the module.

    Raises:
        AttributeError: No old name, or its successor is not in this module.
    """
    successor, adapter = RENAMED.get(name, ("", None))
    if successor not in names:
        raise missing(module, name)
    warnings.warn(
        f"{module}.{name} is now called {module}.{successor}; the old name will go",
        DeprecationWarning,
        stacklevel=3,
    )
    return partial(adapter, names[successor]) if adapter else names[successor]
