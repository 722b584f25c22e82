"""Window operations in the call forms of every BlueFog version, and asyncddp's look into one slot."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch import Tensor

import fogdist
from fogdist.bluefog.deprecation import warn_once
from fogdist.context import current, handles

__all__ = [
    "neighbor_win_accumulate",
    "neighbor_win_accumulate_nonblocking",
    "neighbor_win_get",
    "neighbor_win_get_nonblocking",
    "neighbor_win_put",
    "neighbor_win_put_nonblocking",
    "win_accumulate",
    "win_accumulate_nonblocking",
    "win_cancel",
    "win_get",
    "win_get_nonblocking",
    "win_mutex",
    "win_put",
    "win_put_nonblocking",
    "win_read_neighbor",
]

Function = Callable[..., Any]


def _with_weights_third(write: Function) -> Function:
    """BlueFog up to 0.2.1 had `dst_weights` and `require_mutex` where `self_weight` and `dst_weights` are now."""

    @functools.wraps(write)
    def call(
        tensor: Any,
        name: str,
        self_weight: Any = None,
        dst_weights: Any = None,
        require_mutex: bool = False,
        **options: Any,
    ) -> Any:
        if isinstance(dst_weights, bool):
            dst_weights, require_mutex = None, dst_weights
        if isinstance(self_weight, (Mapping, list, tuple)) and dst_weights is None:
            self_weight, dst_weights = None, self_weight
        return write(tensor, name, self_weight, dst_weights, require_mutex, **options)

    return call


def _without_own_rank(get: Function) -> Function:
    """BlueFog's documentation lets `src_weights` name the own rank, whose tensor is here already."""

    @functools.wraps(get)
    def call(name: str, src_weights: Any = None, require_mutex: bool = False, **options: Any) -> Any:
        own = fogdist.rank(group=options.get("group"))
        if isinstance(src_weights, Mapping) and own in src_weights:
            if src_weights[own] != 1:
                warn_once(
                    f"{get.__name__}: this rank's own weight has no effect; give it to win_update as self_weight"
                )
            src_weights = {rank: weight for rank, weight in src_weights.items() if rank != own}
        return get(name, src_weights, require_mutex, **options)

    return call


win_put = neighbor_win_put = _with_weights_third(fogdist.neighbor_win_put)
win_put_nonblocking = neighbor_win_put_nonblocking = _with_weights_third(fogdist.neighbor_win_put_nonblocking)
win_accumulate = neighbor_win_accumulate = _with_weights_third(fogdist.neighbor_win_accumulate)
win_accumulate_nonblocking = neighbor_win_accumulate_nonblocking = _with_weights_third(
    fogdist.neighbor_win_accumulate_nonblocking
)
win_get = neighbor_win_get = _without_own_rank(fogdist.neighbor_win_get)
win_get_nonblocking = neighbor_win_get_nonblocking = _without_own_rank(fogdist.neighbor_win_get_nonblocking)


@contextmanager
def win_mutex(
    name: str | Iterable[SupportsIndex] | None = None,
    for_self: bool = False,
    ranks: Iterable[SupportsIndex] | None = None,
    *,
    exclusive: bool = True,
) -> Iterator[None]:
    """As `fogdist.win_mutex`; without a name, as in BlueFog up to 0.2.1, for all windows that are open.

    There each rank had one mutex, here each slot of a window has one. ``win_mutex(ranks)`` holds those of the slots that
    this rank writes to at out-neighbors among these ranks, and those of its own slots: a ``win_sync_then_collect`` in
    the block takes them too, and would else wait for a neighbor that waits for this rank. While no window is open, it
    holds the one mutex that each of these ranks has then.

    Args:
        name: Of the window; or the ranks; or None for all out-neighbors.
        for_self: As there.
        ranks: As there, with a name; without one, as `name`.
        exclusive: Must be True, as BlueFog 0.2.1 had it by default.

    Raises:
        TypeError: As there.
        ValueError: As there; `exclusive` is False.
        RuntimeError: As there.
    """
    if exclusive is not True:
        raise ValueError(f"exclusive must be True: mutexes are not shared, got {exclusive!r}")
    with ExitStack() as held:
        if not isinstance(name, str) and not fogdist.get_current_created_window_names():
            for owner in sorted(_owners(ranks if name is None else name, for_self)):
                held.enter_context(_mutex_of(owner))
        elif isinstance(name, str):
            held.enter_context(fogdist.win_mutex(name, for_self, ranks))
        else:
            for window, owner, writer in _mutexes(ranks if name is None else name, for_self):
                is_own = owner == fogdist.rank()
                held.enter_context(fogdist.win_mutex(window, is_own, [writer if is_own else owner]))
        yield


def win_read_neighbor(name: str, rank: int, require_mutex: bool = True) -> Tensor:
    """Returns a copy of one slot, with the values that an in-neighbor has put or added. Versions are 0 afterwards.

    Args:
        name: Of the window.
        rank: The in-neighbor.
        require_mutex: True to hold the slot's mutex meanwhile.

    Raises:
        TypeError: As `fogdist.win_update`.
        ValueError: As `fogdist.win_update`.
        RuntimeError: As `fogdist.win_update`.
    """
    return fogdist.win_update(
        name, self_weight=0.0, neighbor_weights={rank: 1.0}, clone=True, require_mutex=require_mutex
    )


def win_cancel(handle: int) -> None:
    """Frees a handle that will not be waited for, as asyncddp does. Its operation continues; an unknown handle is ignored."""
    handles().forget(handle)


def _owners(ranks: Iterable[SupportsIndex] | None, for_self: bool) -> set[int]:
    if for_self:
        return {fogdist.rank()}
    return set(fogdist.out_neighbor_ranks() if ranks is None else map(int, ranks))


@contextmanager
def _mutex_of(owner: int) -> Iterator[None]:
    """Holds the mutex of a rank for a block, in the job's Store, as there is no memory of a window to hold one in."""
    group = current()
    store, key, me = group.group.get_group_store(), f"bluefog/mutex/{owner}", f"rank {group.rank}"
    seconds = group.backend.options._timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while (holder := store.compare_set(key, "", me).decode()) != me:
        if time.monotonic() > deadline:
            raise dist.DistBackendError(
                f"win_mutex of rank {owner} timed out after {seconds:g} s: {holder} holds it"
            )
        time.sleep(0.001)
    try:
        yield
    finally:
        store.compare_set(key, me, "")


def _mutexes(ranks: Iterable[SupportsIndex] | None, for_self: bool) -> list[tuple[str, int, int]]:
    """Returns window, owner and writer of each mutex, in an order in which ranks cannot block each other."""
    own, outside = fogdist.rank(), fogdist.out_neighbor_ranks()
    chosen = set(outside if ranks is None else map(int, ranks))
    edges = [(own, rank) for rank in fogdist.in_neighbor_ranks()]
    edges += [(rank, own) for rank in outside if rank in chosen and not for_self]
    windows = fogdist.get_current_created_window_names()
    return [(window, *edge) for window in windows for edge in sorted(edges)]
