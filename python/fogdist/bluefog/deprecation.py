"""Names and arguments of older BlueFog versions, and warnings about them.

Warnings about arguments come once per process, so that they do not fill the output of a training loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

from fogdist.warn import warn_user

# Names of BlueFog 0.1 and 0.2, and what they are called in 0.3. The functions there also take the older arguments.
RENAMED = {
    "win_sync_then_collect": "win_update_then_collect",
    "win_put_async": "win_put_nonblocking",
    "win_accumulate_async": "win_accumulate_nonblocking",
    "win_get_async": "win_get_nonblocking",
    "allreduce_async": "allreduce_nonblocking",
    "allreduce_async_": "allreduce_nonblocking_",
    "broadcast_async": "broadcast_nonblocking",
    "broadcast_async_": "broadcast_nonblocking_",
    "allgather_async": "allgather_nonblocking",
    "neighbor_allgather_async": "neighbor_allgather_nonblocking",
    "neighbor_allreduce_async": "neighbor_allreduce_nonblocking",
    "PowerTwoRingGraph": "ExponentialTwoGraph",
    "PowerGraph": "ExponentialGraph",
    "BiRingGraph": "RingGraph",
    "GetWeights": "GetRecvWeights",
    "GetDynamicSendRecvRanks": "GetDynamicOnePeerSendRecvRanks",
}


def find(name: str, module: str, names: Mapping[str, Any]) -> Any:
    """Returns what an old name stands for among the names of a module, whose ``__getattr__`` calls this, and warns.

    Raises:
        AttributeError: It is no old name, or its successor is not in this module.
    """
    successor = RENAMED.get(name, "")
    if successor not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} is now called {module}.{successor}; the old name will go",
        DeprecationWarning,
        stacklevel=3,
    )
    return names[successor]


@cache
def warn_once(message: str) -> None:
    """Issues a DeprecationWarning, unless the same one was issued before."""
    warn_user(message, DeprecationWarning)


def deprecated_function_arg(arg_name: str, fix: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a decorator, `bluefog.torch.utility`'s: calls with a keyword of this name raise TypeError with the advice."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if arg_name in options:
                raise TypeError(f"{arg_name} is deprecated in {function.__name__}: {fix}")
            return function(*arguments, **options)

        return call

    return decorate
