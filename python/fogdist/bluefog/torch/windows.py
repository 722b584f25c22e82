"""The window operations of BlueFog, which take windows by name; each is a thin layer over `fogdist.Window`.

Every function takes the keyword `group`, by default the group of `init`. A name refers to a window of that group.
Operations that end in "_nonblocking" return a handle for `win_wait` and `win_poll`, or for `wait` and `poll`.

The weight of push-sum, p, travels with puts and accumulates and is combined by updates of all windows while
`turn_on_win_ops_with_associated_p` is in effect.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, SupportsIndex, cast

import torch.distributed as dist
from torch import Tensor

import fogdist
from fogdist.bluefog.deprecation import warn_once
from fogdist.bluefog.handles import Begun, forms
from fogdist.context import current

Group = dist.ProcessGroup | None
_with_p = False


class UnknownWindowError(KeyError, ValueError):
    """No open window of the group has this name.

    It is a ValueError, as every bad argument value in fogdist, and a KeyError too because some of BlueFog's
    functions raised that.
    """

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError would show the message in quotes


def win_create(tensor: Tensor, name: str, zero_init: bool = False, *, group: Group = None) -> bool:
    """As `fogdist.Window`; returns True, or False, and does nothing, if the group has a window of this name."""
    if isinstance(name, str) and name in current(group).windows:
        return False
    if name is None:
        raise TypeError("name must be a string, got NoneType")
    fogdist.Window(tensor, group, name=name, zero_init=zero_init)
    return True


def win_free(name: str | None = None, *, group: Group = None) -> bool:
    """Frees a window, or all windows of the group in the order in which they were made, and returns True. Collective.

    It waits until the neighbors free it too.
    """
    for each in list(current(group).windows) if name is None else [name]:
        _window(each, group).free()
    return True


def _true(_: dist.Work) -> bool:
    return True


def _begin_write(
    method: str,
    tensor: Tensor,
    name: str,
    self_weight: Any = None,
    dst_weights: Any = None,
    require_mutex: bool = False,
    *,
    group: Group = None,
    **options: Any,
) -> Begun:
    # BlueFog up to 0.2.1 had `dst_weights` and `require_mutex` where `self_weight` and `dst_weights` are now.
    if isinstance(dst_weights, bool):
        dst_weights, require_mutex = None, dst_weights
    if isinstance(self_weight, (Mapping, list, tuple)) and dst_weights is None:
        self_weight, dst_weights = None, self_weight
    work: dist.Work = getattr(_window(name, group), method)(
        tensor,
        self_weight=1.0 if self_weight is None else self_weight,
        dst_weights=dst_weights,
        require_mutex=require_mutex,
        with_p=_with_p,
        async_op=True,
        **options,
    )
    return work, _true


def _begin_get(
    name: str,
    src_weights: Any = None,
    require_mutex: bool = False,
    *,
    group: Group = None,
    **options: Any,
) -> Begun:
    # BlueFog's documentation lets `src_weights` name the own rank, whose tensor is here already.
    own = fogdist.rank(group=group)
    if isinstance(src_weights, Mapping) and own in src_weights:
        if src_weights[own] != 1:
            warn_once("win_get: this rank's own weight has no effect; give it to win_update as self_weight")
        src_weights = {rank: weight for rank, weight in src_weights.items() if rank != own}
    options |= {"src_weights": src_weights, "require_mutex": require_mutex}
    return _window(name, group).get(async_op=True, **options), _true


_MEANING = "As `fogdist.Window.{}`, of the window of this name; returns True."
neighbor_win_put, neighbor_win_put_nonblocking = forms(
    _begin_write, "neighbor_win_put", "put", doc=_MEANING.format("put")
)
neighbor_win_accumulate, neighbor_win_accumulate_nonblocking = forms(
    _begin_write, "neighbor_win_accumulate", "accumulate", doc=_MEANING.format("accumulate")
)
neighbor_win_get, neighbor_win_get_nonblocking = forms(
    _begin_get, "neighbor_win_get", doc=_MEANING.format("get")
)
win_put, win_put_nonblocking = neighbor_win_put, neighbor_win_put_nonblocking
win_accumulate, win_accumulate_nonblocking = neighbor_win_accumulate, neighbor_win_accumulate_nonblocking
win_get, win_get_nonblocking = neighbor_win_get, neighbor_win_get_nonblocking


def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
    *,
    group: Group = None,
) -> Tensor:
    """Returns ``self_weight * tensor + sum_j neighbor_weights[j] * slot_j``, as `fogdist.Window.update`."""
    return _window(name, group).update(
        self_weight=self_weight,
        neighbor_weights=neighbor_weights,
        reset=reset,
        clone=clone,
        require_mutex=require_mutex,
        with_p=_with_p,
    )


def win_sync(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
) -> Tensor:
    """As `win_update`, which BlueFog up to 0.2.1 called so; with `reset` it holds the mutexes."""
    warn_once("win_sync is called win_update now; the old name will go")
    return win_update(name, self_weight, neighbor_weights, reset, clone, require_mutex=reset)


def win_update_then_collect(name: str, require_mutex: bool = True, *, group: Group = None) -> Tensor:
    """Adds all slots to the window's tensor, returns it, and leaves zeros in them, as `fogdist.Window.collect`."""
    return _window(name, group).collect(require_mutex=require_mutex, with_p=_with_p)


def win_read_neighbor(name: str, rank: int, require_mutex: bool = True) -> Tensor:
    """Returns a copy of the slot of an in-neighbor, with what it has put or added. Versions are 0 afterwards."""
    return win_update(name, 0.0, {rank: 1.0}, clone=True, require_mutex=require_mutex)


@contextmanager
def win_mutex(
    name: str | Iterable[SupportsIndex] | None = None,
    for_self: bool = False,
    ranks: Iterable[SupportsIndex] | None = None,
    *,
    exclusive: bool = True,
    group: Group = None,
) -> Iterator[None]:
    """Holds mutexes of a window for a block, as `fogdist.Window.mutex`; without a name, as in BlueFog up to 0.2.1, of all.

    There each rank had one mutex, here each slot of a window has one. ``win_mutex(ranks)`` holds those of the slots that
    this rank writes to at out-neighbors among these ranks, and those of its own slots: a ``win_sync_then_collect`` in
    the block takes them too, and would else wait for a neighbor that waits for this rank. While no window is open, it
    holds the one mutex that each of these ranks has then. `exclusive` must be True, as BlueFog 0.2.1 had it by default.
    """
    if exclusive is not True:
        raise ValueError(f"exclusive must be True: mutexes are not shared, got {exclusive!r}")
    with ExitStack() as held:
        if not isinstance(name, str) and not get_current_created_window_names():
            for owner in sorted(_owners(ranks if name is None else name, for_self)):
                held.enter_context(_mutex_of(owner))
        elif isinstance(name, str):
            held.enter_context(_window(name, group).mutex(ranks, for_self=for_self))
        else:
            for window, owner, writer in _mutexes(ranks if name is None else name, for_self):
                is_own = owner == fogdist.rank()
                mutex = _window(window, None).mutex([writer if is_own else owner], for_self=is_own)
                held.enter_context(mutex)
        yield


def win_lock(name: str, *, group: Group = None) -> AbstractContextManager[None]:
    """Holds all mutexes that this rank owns for a block, as `fogdist.Window.lock`."""
    return _window(name, group).lock()


def get_win_version(name: str, *, group: Group = None) -> dict[int, int]:
    """Returns {in-neighbor: number of puts and gets into its slot on this rank since the last `win_update`}."""
    window = _window(name, group)
    return {rank: window.version(rank) for rank in window.in_neighbors}


def get_current_created_window_names(*, group: Group = None) -> list[str]:
    """Returns the names of the group's open windows, sorted."""
    return sorted(current(group).windows)


def win_associated_p(name: str, *, group: Group = None) -> float:
    """Returns this rank's weight of push-sum in a window: 1.0 until operations with p have changed it."""
    return _window(name, group).p


def turn_on_win_ops_with_associated_p() -> None:
    """Makes puts, accumulates and updates of all windows treat p like the tensor from now on: `with_p=True`."""
    global _with_p
    _with_p = True


def turn_off_win_ops_with_associated_p() -> None:
    """Makes window operations leave p unchanged, which is the default."""
    global _with_p
    _with_p = False


def _window(name: str, group: Group) -> fogdist.Window:
    windows = current(group).windows
    window = windows.get(name) if isinstance(name, str) else None
    if window is None:
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {type(name).__name__}")
        raise UnknownWindowError(f"name must be that of an open window, of {sorted(windows)}, got {name!r}")
    return cast("fogdist.Window", window)


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
    return [(window, *edge) for window in get_current_created_window_names() for edge in sorted(edges)]
