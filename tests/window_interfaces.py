"""Windows by each of their interfaces, on ranks that reach each other in each of the ways: the two axes of the tests.

`AnyWindow` has one set of methods for `_C.Window`, `fogdist.Window` and the functions `win_*`, so each promise is one
function. `WorldsByWay` has the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import fogdist.bluefog.torch as bf
import networkx as nx
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from fogdist.context import current
from harness import World, WorldPool
from hosts import emulated_hosts, world_on_hosts
from torch import Tensor

INTERFACES = ["_C", "object", "name"]
# The ways in which ranks reach each other, with the environment that selects each. "hosts" are network namespaces, of
# which the first has all ranks but one, so both memory and TCP are used.
WAYS = {
    "memory": {},
    "tcp": {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "tcp"},
    "rma": {"_FOG_LOCAL_LINKS": "0", "FOG_BETWEEN_HOSTS": "rma"},
    "hosts": {"_FOG_CONFIRM": "1", "FOG_BETWEEN_HOSTS": "tcp"},
}
SIZE = 3
# Limits of hangs.
LIMIT = 20.0
SOON = timedelta(seconds=10)
SHORT = timedelta(milliseconds=100)


class WorldsByWay:
    """Worlds by way and size; `world_of(way, size)` returns a shared one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pools = {way: WorldPool(environment=WAYS[way]) for way in WAYS if way != "hosts"}
        self._on_hosts: World | None = None
        self._ends = contextlib.ExitStack()
        self._names: list[str] = []

    def __call__(self, way: str, size: int = SIZE) -> World:
        if way != "hosts":
            return self._pools[way](size)
        if self._on_hosts is None or self._on_hosts.broken or self._on_hosts.size != size:
            self._on_hosts = self.on_hosts([0] * (size - 1) + [1])
        return self._on_hosts

    def on_hosts(self, placement: list[int], **options: Any) -> World:
        """Returns a new world on hosts, for the caller to close, and ends the shared one, which has the same port."""
        if self._on_hosts is not None:
            self._on_hosts.close()
            self._on_hosts = None
        self._names = self._names or self._ends.enter_context(emulated_hosts(2))
        return world_on_hosts(self._names, placement, self._folder, WAYS["hosts"], **options)

    def close(self) -> None:
        """Ends all shared worlds and the hosts."""
        with self._ends:
            if self._on_hosts is not None:
                self._on_hosts.close()
            for pool in self._pools.values():
                pool.close()


def new_by_way(world_of: WorldsByWay, new_world: Callable[..., World], way: str, **options: Any) -> World:
    """Returns a world for a single test, which may leave it unusable and has to close it."""
    if way == "hosts":
        return world_of.on_hosts([0, 1, 1], **options)
    return new_world(SIZE, environment=WAYS[way], **options)


def backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def others() -> list[int]:
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def create(tensor: Tensor, name: str = "w", **options: Any) -> Any:
    """Creates a `_C.Window` in which all ranks are neighbors of each other."""
    return backend().create_window(tensor, name, others(), others(), **options)


def slot(window: Any, rank: int) -> Tensor:
    """Returns the contents of this rank's slot for `rank`, and resets its version."""
    return window.update(0.0, [(rank, 1.0)], clone=True)


# The device of the tensors of `full`, which test_device_windows.py changes in its ranks.
home: list[str | torch.device] = ["cpu"]


def full(value: float, numel: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((numel,), value, dtype=dtype, device=home[0])


def right_ring(size: int) -> nx.DiGraph:
    return topologies.ring(size, connect_style=2)


def one_way(size: int) -> nx.DiGraph:
    """Returns a graph in which rank 0 writes to all others."""
    graph = nx.DiGraph((0, rank) for rank in range(1, size))
    graph.add_nodes_from(range(size))
    return graph


class Started:
    """An operation that does not block its caller: a Work, or a handle of BlueFog's functions."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def wait(self) -> None:
        if isinstance(self._operation, int):
            assert bf.win_wait(self._operation) is True
        else:
            self._operation.wait()

    def done(self) -> bool:
        if isinstance(self._operation, int):
            return bf.win_poll(self._operation)
        return bool(self._operation.is_completed())


class AnyWindow:
    """A window by one of the interfaces; ranks that are left out are all neighbors, with weights of 1.

    Args:
        interface: Of INTERFACES.
        tensor: The window's.
        graph: Makes the topology from the number of ranks.
        name: The window's name.
        zero_init: Whether slots start with zeros.
    """

    def __init__(
        self,
        interface: str,
        tensor: Tensor,
        graph: Callable[[int], nx.DiGraph] = topologies.fully_connected,
        *,
        name: str = "w",
        zero_init: bool = True,
    ) -> None:
        self.interface, self.name, self.tensor = interface, name, tensor
        made, rank = graph(dist.get_world_size()), dist.get_rank()
        self.sources = sorted({*made.predecessors(rank)} - {rank})
        self.destinations = sorted({*made.successors(rank)} - {rank})
        if interface == "_C":
            neighbors = self.sources, self.destinations
            self.raw = backend().create_window(tensor, name, *neighbors, zero_init=zero_init)
            return
        fogdist.init(graph)
        if interface == "object":
            self.object = fogdist.Window(tensor, name=name, zero_init=zero_init)
        else:
            assert bf.win_create(tensor, name, zero_init) is True
            self.object = current(None).windows[name]
        self.raw = self.object._open()
        assert (self.object.in_neighbors, self.object.out_neighbors) == (self.sources, self.destinations)

    def _fogdist(self, operation: str, *tensor: Tensor, p: bool | None = None, **arguments: Any) -> Any:
        """Calls the object's method, or the function that takes the name, for which p is a setting."""
        if self.interface == "object":
            with_p = {} if p is None else {"with_p": p}
            return getattr(self.object, operation)(*tensor, **arguments, **with_p)
        if p:
            bf.turn_on_win_ops_with_associated_p()
        try:
            return getattr(bf, f"win_{operation}")(*tensor, self.name, **arguments)
        finally:
            bf.turn_off_win_ops_with_associated_p()

    def write(
        self,
        kind: str,
        tensor: Tensor,
        to: Mapping[int, float] | None = None,
        *,
        keep: float = 1.0,
        p: bool = False,
        mutex: bool = False,
        **options: Any,
    ) -> Started:
        """Starts a "put" or "accumulate"; `keep` is the share that the sender keeps."""
        to = dict.fromkeys(self.destinations, 1.0) if to is None else to
        if self.interface == "_C":
            call = getattr(self.raw, kind)
            return Started(call(tensor, [*to.items()], keep, with_p=p, mutex=mutex, **options))
        weights = {"self_weight": keep, "dst_weights": to, "require_mutex": mutex}
        if self.interface == "object":
            return Started(self._fogdist(kind, tensor, p=p, async_op=True, **weights, **options))
        return Started(self._fogdist(f"{kind}_nonblocking", tensor, p=p, **weights, **options))

    def put(self, tensor: Tensor, to: Mapping[int, float] | None = None, **options: Any) -> None:
        self.write("put", tensor, to, **options).wait()

    def accumulate(self, tensor: Tensor, to: Mapping[int, float] | None = None, **options: Any) -> None:
        self.write("accumulate", tensor, to, **options).wait()

    def get(self, of: Mapping[int, float] | None = None, *, mutex: bool = False, **options: Any) -> None:
        of = dict.fromkeys(self.sources, 1.0) if of is None else of
        if self.interface == "_C":
            self.raw.get([*of.items()], mutex=mutex, **options).wait()
        else:
            self._fogdist("get", src_weights=of, require_mutex=mutex, **options)

    def update(
        self,
        own: float,
        of: Mapping[int, float] | None = None,
        *,
        reset: bool = False,
        clone: bool = False,
        mutex: bool = False,
        p: bool = False,
    ) -> Tensor:
        of = dict.fromkeys(self.sources, 1.0) if of is None else of
        flags = {"reset": reset, "clone": clone}
        if self.interface == "_C":
            return self.raw.update(own, [*of.items()], **flags, mutex=mutex, with_p=p)
        weights = {"self_weight": own, "neighbor_weights": of}
        return self._fogdist("update", p=p, **weights, **flags, require_mutex=mutex)

    def slot(self, rank: int) -> Tensor:
        """Returns the contents of this rank's slot for `rank`, and resets its version."""
        return self.update(0.0, {rank: 1.0}, clone=True)

    def version(self, rank: int) -> int:
        if self.interface == "name":
            return bf.get_win_version(self.name)[rank]
        return (self.raw if self.interface == "_C" else self.object).version(rank)

    @property
    def p(self) -> float:
        if self.interface == "name":
            return bf.win_associated_p(self.name)
        return (self.raw if self.interface == "_C" else self.object).p

    @p.setter
    def p(self, p: float) -> None:  # which the functions that take names cannot do
        self.raw.p = p

    @contextlib.contextmanager
    def hold(self, ranks: list[int], own: bool = False, **options: Any) -> Iterator[None]:
        """Holds the mutexes that `ranks` own with this rank, or those that this rank owns with them."""
        if self.interface != "_C":
            with self._fogdist("mutex", ranks=ranks, for_self=own, **options):
                yield
            return
        hold = self.raw.hold(ranks, own=own, **options)
        try:
            yield
        finally:
            hold.release()

    def free(self, *timeout: timedelta) -> None:
        if self.interface == "_C":
            self.raw.free(*timeout)
        elif timeout:
            self.object.free(timeout=timeout[0])
        else:
            self._fogdist("free")


def pids() -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, torch.tensor([os.getpid()]))
    return [int(part) for part in parts]


def has_stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped; SIGSTOP stops one after the other."""
    threads = [status.read_text() for status in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(thread.rpartition(")")[2].split()[0] in ("T", "t") for thread in threads)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops all threads of a process in this block, which begins after they have stopped."""
    os.kill(pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + LIMIT
        while not has_stopped(pid):
            assert time.monotonic() < end
            time.sleep(0.001)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
