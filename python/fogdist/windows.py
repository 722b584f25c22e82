"""A one-sided window: a tensor of each rank and a slot for each in-neighbor, which the in-neighbor writes to.

Only `Window()` and `free` need the cooperation of other ranks. A put reaches the neighbor's memory even if the neighbor
is busy, and an update uses the values that have arrived.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from fogdist.arguments import dense, writable
from fogdist.context import Context, current
from fogdist.exchange import check_together, check_weight, weighted_peers
from fogdist.removed import missing
from fogdist.topology import check_neighbor_ranks
from fogdist.topology.validation import check_flags

if TYPE_CHECKING:
    from fog_pg import _C

# Ranks with weights, as callers pass them. Ranks without weights have the weight 1.
Weights = Iterable[SupportsIndex] | Mapping[int, float]


class WriteOptions(TypedDict, total=False):
    """Keywords of `Window.put` and `Window.accumulate`, which `Window.put` explains."""

    self_weight: float
    dst_weights: Weights | None
    require_mutex: bool
    with_p: bool
    skip_lost: bool
    timeout: timedelta | None


class Window:
    """A tensor that neighbors read, and a slot for each in-neighbor that it writes to. Collective.

    The neighbors are those of the group's topology, which cannot change while the group has windows. `put` and
    `accumulate` write into slots of the out-neighbors, `get` copies the in-neighbors' tensors into the slots of this
    rank, and `update` combines this rank's tensor with its slots. A reader never sees a half-written value. With
    `reset`, `update` adds each value exactly once. docs/windows.md describes the promises when ranks race.

    The group keeps its windows: a window is open until `free`, `fogdist.shutdown` or the end of the group, even if
    the script drops the object. As a context manager it frees itself at the end of the block; if the block raises, it
    ends without waiting for the others.

    The tensor may be on any device, but all ranks must use one type of device. `transport` names the way of the data
    to the neighbors. The slots of a tensor on a device are in host memory ("staged"). Operations follow the order of
    the device's current stream: an operation sends the tensor as it is after the work on the stream, and the result of
    `update` is ready for the work that follows. docs/windows.md explains where the host waits.

    Args:
        tensor: Contiguous tensor of integers, float16, bfloat16, float32, float64, complex64 or complex128; of
            one shape, dtype and type of device on all ranks. It stays the same tensor (a parameter stays that
            parameter), but its memory moves to where neighbors reach it, as with `fogdist.share_`; that of a device's
            tensor stays where it is.
        group: The group of ranks; by default that of `init`.
        name: The same on all ranks, for messages and for the functions that take names; by default "window 0"
            and so on.
        zero_init: True to start with zeros in the slots, False with copies of this rank's own tensor.
        timeout: Of this call; by default the group's.

    Raises:
        TypeError: `tensor` is not a dense torch.Tensor, `name` not a string, `zero_init` not a bool, or `group`
            not a process group.
        ValueError: `tensor` is not contiguous or of another dtype; the group has a window of this name; ranks
            disagree (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """

    def __init__(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | Context | None = None,
        *,
        name: str | None = None,
        zero_init: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        if isinstance(group, str):
            raise TypeError(f"group must be a ProcessGroup, got str; name is a keyword: name={group!r}")
        context = current(group)
        dense(tensor)
        check_flags(zero_init=zero_init)
        if name is None:
            name = next(unused for i in itertools.count() if (unused := f"window {i}") not in context.windows)
        elif not isinstance(name, str):
            raise TypeError(f"name must be a string, got {type(name).__name__}")
        elif name in context.windows:
            raise ValueError(f"name must not be that of an open window of the group, got {name!r}")
        self._tensor = tensor
        self._name = name
        self._rank, self._size = context.rank, context.size
        self._in = sorted(context.topology.in_neighbors)
        self._out = sorted(context.topology.out_neighbors)
        self._all_in, self._all_out = _ones(self._in), _ones(self._out)
        own, others = context.topology.mean_weights
        self._mean = own, list(others.items())
        self._window: _C.Window | None = context.backend.create_window(
            tensor, name, self._in, self._out, zero_init=zero_init, timeout=timeout
        )
        self._transport = self._window.transport
        neighbors = sorted({*self._in, *self._out})
        self._transports = {rank: self._window.transport_to(rank) for rank in neighbors}
        self._closed_because = ""
        # All contexts that the group gets by calls of fogdist.init share this dict.
        self._windows = context.windows
        self._windows[name] = self

    # --- properties ---

    @property
    def tensor(self) -> Tensor:
        """The tensor that the window was made of."""
        return self._tensor

    @property
    def name(self) -> str:
        """The name, unique among the group's open windows."""
        return self._name

    @property
    def in_neighbors(self) -> list[int]:
        """The ranks that write to this one and that it gets tensors from, in ascending order."""
        return list(self._in)

    @property
    def out_neighbors(self) -> list[int]:
        """The ranks that this one writes to, in ascending order."""
        return list(self._out)

    @property
    def transport(self) -> str:
        """How this rank's operations reach its neighbors; `transports` lists each neighbor.

        For a tensor on the CPU: "shared memory" if this rank has mapped the memory of all neighbors; for neighbors on
        other hosts "rma" if the network itself reads and writes there, otherwise "messages". "messages" also stands for
        neighbors whose memory the system refused to map. Different transports are joined by " and ". For a tensor on a
        device it is "staged", which means through host memory.
        """
        return self._transport

    @property
    def transports(self) -> dict[int, str]:
        """By neighbor: "shared memory", "rma", "messages", "staged", "staged, by rma" or "staged, by messages"."""
        return dict(self._transports)

    @property
    def p(self) -> float:
        """This rank's weight of push-sum, 1.0 at first. Operations with `with_p` send it."""
        return self._open().p

    @p.setter
    def p(self, p: float) -> None:
        self._open().p = check_weight(p, "p")

    def version(self, rank: int) -> int:
        """Returns the number of puts and gets into the slot of an in-neighbor since the last `update`.

        Raises:
            ValueError: `rank` is not an in-neighbor.
            RuntimeError: The window is closed.
        """
        return self._open().version(rank)

    def slot_p(self, rank: int) -> float:
        """Returns the p in the slot of an in-neighbor, 0.0 before the first one; raises as `version`."""
        return self._open().slot_p(rank)

    def __repr__(self) -> str:
        state = f"closed: it {self._closed_because}" if self._window is None else "open"
        tensor = f"{tuple(self._tensor.shape)} {self._tensor.dtype} on {self._tensor.device}"
        return f"<fogdist.Window {self._name!r} of {tensor}, {self._transport}, {state}>"

    # --- one-sided operations ---

    def put(self, tensor: Tensor, *, async_op: bool = False, **options: Unpack[WriteOptions]) -> Any:
        """Overwrites this rank's slots at its neighbors with weighted tensors; their versions increase by one.

        Args:
            tensor: Of the window's shape and dtype; it may be the window's own.
            self_weight: The share that this rank keeps: `tensor`, and p if `with_p`, are multiplied by it in place once
                all neighbors have received theirs. If the operation fails, they are not multiplied.
            dst_weights: {out-neighbor: weight}, or out-neighbors that all weigh 1; by default all of them.
                Weight 0.0 stands for zeros.
            require_mutex: True to hold each slot's mutex during the operation, see `mutex`.
            with_p: True to send p too, by the same weights. Otherwise the slots keep their p.
            skip_lost: True to skip neighbors that are known to be lost. Their shares are lost with them.
            timeout: For mutexes, and for neighbors on other hosts; by default the group's.
            async_op: True to return a `torch.distributed.Work` at once. `tensor` must not change before its `wait`
                has returned, or its `is_completed` has returned True: by then it is scaled by `self_weight`.

        Raises:
            TypeError: `tensor` is not a dense torch.Tensor, a weight not a real number, a rank not an integer,
                a flag not a bool.
            ValueError: Another shape or dtype than the window's; ranks that are not out-neighbors or given
                twice; a weight that is not finite.
            RuntimeError: The window is closed; torch.distributed.DistBackendError if a neighbor was lost or
                did not answer; the group can still be used. If it was known to be lost, nothing was sent.
        """
        return _finished(self._write("put", tensor, not async_op, **options), async_op)

    def accumulate(self, tensor: Tensor, *, async_op: bool = False, **options: Unpack[WriteOptions]) -> Any:
        """Adds weighted tensors to this rank's slots at its neighbors; versions stay. Otherwise as `put`.

        Every addition is in exactly one of the owner's updates with `reset`.
        """
        return _finished(self._write("accumulate", tensor, not async_op, **options), async_op)

    def get(
        self,
        *,
        src_weights: Weights | None = None,
        require_mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Any:
        """Overwrites slots of this rank with the weighted tensors of in-neighbors; their versions increase by one.

        It never reads a half-done `update`. It may read a part of other changes to the neighbor's tensor, unless the
        neighbor holds the mutex during the change and this call has `require_mutex`.

        Args:
            src_weights: {in-neighbor: weight}, or in-neighbors that all weigh 1; by default all of them.
            require_mutex: As in `put`.
            skip_lost: As in `put`.
            timeout: As in `put`.
            async_op: As in `put`.

        Raises:
            TypeError: As `put`.
            ValueError: As `put`, of in-neighbors.
            RuntimeError: As `put`.
        """
        if not type(require_mutex) is type(skip_lost) is bool:
            check_flags(require_mutex=require_mutex, skip_lost=skip_lost)
        sources = self._all_in
        if src_weights is not None:
            sources = self._peers(src_weights, self._in, "src_weights", "in-neighbors")
        work = self._open().get(
            sources, mutex=require_mutex, skip_lost=skip_lost, timeout=timeout, waits=not async_op
        )
        return _finished(work, async_op)

    # --- local operations ---

    def update(
        self,
        *,
        self_weight: float | None = None,
        neighbor_weights: Mapping[int, float] | None = None,
        reset: bool = False,
        clone: bool = False,
        require_mutex: bool = False,
        with_p: bool = False,
        timeout: timedelta | None = None,
    ) -> Tensor:
        """Returns ``self_weight * tensor + sum_j neighbor_weights[j] * slot_j``; all versions are 0 again.

        Args:
            self_weight: Weight of this rank's tensor. By default the plain mean of the tensor and all slots,
                or the weights of the topology.
            neighbor_weights: {in-neighbor: weight}; given exactly if `self_weight` is. Slots that it leaves out
                do not count. Neighbors may be lost, because their slots are in this rank's memory.
            reset: True to leave zeros in these slots, and also in their p if `with_p`.
            clone: True to return a new tensor and not to change the window's tensor.
            require_mutex: True to hold the mutexes of these slots during the operation. It waits for neighbors that
                hold them over several operations.
            with_p: True to combine p by the same weights.
            timeout: For mutexes, and for a neighbor that reads the tensor; by default the group's.

        Returns:
            The window's tensor, changed in place, or the clone.

        Raises:
            TypeError: `neighbor_weights` is not a dict, a weight not a real number, a rank not an integer,
                a flag not a bool.
            ValueError: Only one of the weights is given, a rank is not an in-neighbor, a weight is not finite;
                the tensor has other memory than when the window was made.
            RuntimeError: The window is closed; torch.distributed.DistBackendError at the timeout.
        """
        if self_weight is None or neighbor_weights is None:
            check_together(self_weight=self_weight, neighbor_weights=neighbor_weights)
            own, neighbors = self._mean
        elif not isinstance(neighbor_weights, Mapping):
            raise TypeError(
                f"neighbor_weights must be a dict of ranks to weights, got {type(neighbor_weights).__name__}"
            )
        else:
            own = check_weight(self_weight, "self_weight")
            neighbors = self._peers(neighbor_weights, self._in, "neighbor_weights", "in-neighbors")
        return self._update(own, neighbors, reset, clone, require_mutex, with_p, timeout)

    def collect(
        self, *, require_mutex: bool = False, with_p: bool = False, timeout: timedelta | None = None
    ) -> Tensor:
        """Adds all slots to the tensor and leaves zeros in the slots: `update` with weights of 1 and `reset`."""
        return self._update(1.0, self._all_in, True, False, require_mutex, with_p, timeout)

    @contextlib.contextmanager
    def mutex(
        self,
        ranks: Iterable[SupportsIndex] | None = None,
        *,
        for_self: bool = False,
        timeout: timedelta | None = None,
    ) -> Iterator[None]:
        """Holds mutexes for a block; operations with `require_mutex` take the same ones.

        Each rank owns a mutex for each of its neighbors. It protects the slot that this neighbor writes to, and the
        rank's own tensor while this neighbor reads it. Mutexes are fair, and a thread may take a mutex that it holds.
        The mutexes of a lost rank become free. One call takes its mutexes in an order in which ranks cannot deadlock;
        a call inside the block of another call can deadlock.

        Args:
            ranks: By default all out-neighbors, or with `for_self` all in-neighbors.
            for_self: False for the mutexes that `ranks` own with this rank, True for those that this rank
                owns with `ranks`.
            timeout: For all of them; by default the group's.

        Raises:
            TypeError: `ranks` is not an iterable of integers, or `for_self` not a bool.
            ValueError: A rank is not a neighbor, or given twice.
            RuntimeError: The window is closed; torch.distributed.DistBackendError at the timeout, with no
                mutex held.
        """
        check_flags(for_self=for_self)
        if ranks is None:
            peers = self._in if for_self else self._out
        else:
            peers = check_neighbor_ranks(ranks, self._rank, self._size, "ranks")
        with self._holding(peers, for_self, timeout):
            yield

    @contextlib.contextmanager
    def lock(self, *, timeout: timedelta | None = None) -> Iterator[None]:
        """Holds all mutexes that this rank owns: neighbors' operations with `require_mutex` wait.

        Argument and errors as of `mutex`.
        """
        with self._holding(sorted({*self._in, *self._out}), True, timeout):
            yield

    # --- end of the window ---

    def free(self, *, timeout: timedelta | None = None) -> None:
        """Closes the window when all neighbors have called it; collective. Does nothing if the window is closed.

        It waits for this rank's operations in flight, and for neighbors that are not lost. The tensor keeps its
        values.

        Args:
            timeout: By default the group's.

        Raises:
            torch.distributed.DistBackendError: A neighbor did not come in time. The window is closed all the
                same.
        """
        window, self._window = self._window, None
        if window is None:
            return
        self._closed_because = "was freed"
        self._forget()
        window.free() if timeout is None else window.free(timeout)

    def abandon(self, reason: str) -> None:
        """Closes the window without waiting for other ranks.

        Later writes of neighbors on this host have no effect; on other hosts, they are an error of the writer.

        Args:
            reason: The event that ended it, for messages: "was ...".
        """
        if self._window is not None:
            self._window, self._closed_because = None, reason
            self._forget()

    def __enter__(self) -> Window:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.free()
        else:
            self.abandon(f"was closed by a {type(error).__name__} in its block")

    # --- inside ---

    def _open(self) -> _C.Window:
        window = self._window
        if window is None:
            raise RuntimeError(f"window {self._name!r} {self._closed_because}")
        return window

    def _forget(self) -> None:
        if self._windows.get(self._name) is self:
            del self._windows[self._name]

    def _write(
        self,
        kind: str,
        tensor: Tensor,
        waits: bool,
        self_weight: float = 1.0,
        dst_weights: Weights | None = None,
        require_mutex: bool = False,
        with_p: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        window = self._open()
        data = dense(tensor)
        if not type(require_mutex) is type(with_p) is type(skip_lost) is bool:
            check_flags(require_mutex=require_mutex, with_p=with_p, skip_lost=skip_lost)
        keeps = check_weight(self_weight, "self_weight")
        destinations = self._all_out
        if dst_weights is not None:
            destinations = self._peers(dst_weights, self._out, "dst_weights", "out-neighbors")
        if keeps != 1.0:
            writable(tensor)
        write = window.put if kind == "put" else window.accumulate
        return write(data, destinations, keeps, with_p, require_mutex, skip_lost, timeout, waits)

    def _update(
        self,
        own: float,
        neighbors: Sequence[tuple[int, float]],
        reset: bool,
        clone: bool,
        require_mutex: bool,
        with_p: bool,
        timeout: timedelta | None,
    ) -> Tensor:
        if not type(reset) is type(clone) is type(require_mutex) is type(with_p) is bool:
            check_flags(reset=reset, clone=clone, require_mutex=require_mutex, with_p=with_p)
        result = self._open().update(
            own, neighbors, reset=reset, clone=clone, mutex=require_mutex, with_p=with_p, timeout=timeout
        )
        return result if clone else self._tensor

    def _peers(
        self, weights: Weights, neighbors: Sequence[int], argument: str, what: str
    ) -> list[tuple[int, float]]:
        """Returns neighbors with weights in ascending order, so that rounding does not depend on a dict's order."""
        if isinstance(weights, dict) and all(
            type(rank) is int and rank in neighbors and type(weight) is float and math.isfinite(weight)
            for rank, weight in weights.items()
        ):  # the most frequent case, kept fast because a put takes only a few microseconds
            return sorted(weights.items())
        ranks = check_neighbor_ranks(weights, self._rank, self._size, argument)
        others = [rank for rank in ranks if rank not in neighbors]
        if others:
            raise ValueError(
                f"{argument} must name {what} of rank {self._rank} only, {list(neighbors)}, got {others}"
            )
        if not isinstance(weights, Mapping):
            return [(rank, 1.0) for rank in sorted(ranks)]
        return weighted_peers(ranks, weights, argument)

    @contextlib.contextmanager
    def _holding(self, ranks: Sequence[int], own: bool, timeout: timedelta | None) -> Iterator[None]:
        # The object releases the mutexes when it is destroyed, because Ctrl-C may come before the `try`.
        hold = self._open().hold(ranks, own=own, timeout=timeout)
        try:
            yield
        finally:
            hold.release()


def _ones(ranks: Iterable[int]) -> list[tuple[int, float]]:
    return [(rank, 1.0) for rank in ranks]


def _finished(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


if not TYPE_CHECKING:  # a type checker is to find misspelt names

    def __getattr__(name: str) -> Any:
        raise missing(__name__, name)
