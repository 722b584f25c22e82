"""Types of the C++ extension; csrc/process_group_fog/bindings.cpp is what they describe.

The extension is loaded by `fog_pg._extension.load`, which also opens the MPI library. Without that only
NeighborPlan works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

# The torch that the extension was compiled for, as in torch/version.h: "2.13.0".
torch_version: str
# Whether the extension is linked with a site's own MPI (FOG_MPICXX) instead of opening an ABI library.
native_mpi: bool

class NeighborPlan:
    """Peers and weights of one neighbor exchange, as one rank sees it; it cannot be changed.

    A rank gets `sum(w * x_j for j, w in sources) + self_weight * x`, where x_j is source j's tensor times
    the weight that j's own plan has for this rank among its destinations. Sums run in the order of `sources`.

    Args:
        rank: This rank in the group.
        size: Ranks of the group.
        self_weight: Weight of this rank's own tensor.
        sources: Ranks this one receives from, with weights.
        destinations: Ranks this one sends to, with weights.
        mean: Divides the sum by `len(sources) + 1` instead of weighting its terms; all weights must be 1.0.

    Raises:
        ValueError: If a rank is out of range, this rank itself or there twice, if a weight is not finite, or
            if `mean` is set and a weight is not 1.0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        self_weight: float,
        sources: Sequence[tuple[int, float]],
        destinations: Sequence[tuple[int, float]],
        *,
        mean: bool = False,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def self_weight(self) -> float: ...
    @property
    def mean(self) -> bool: ...
    @property
    def sources(self) -> list[tuple[int, float]]: ...
    @property
    def destinations(self) -> list[tuple[int, float]]: ...
    def __repr__(self) -> str: ...

class ProcessGroupFog(Backend):
    """The backend object of one group: all of c10d's operations, and those below.

    Operations are asynchronous: each returns a Work at once. For errors in flight (a peer that is lost or late,
    ranks that disagree), `Work.wait()` raises torch.distributed.DistBackendError. Wrong arguments raise
    ValueError or TypeError here, before anything is sent.

    Common arguments:
        name: Rendezvous key of the operation, so that ranks may issue named operations in different orders.
            Without one the key is the operation's place in the program. ValueError if an operation of the
            same kind and name is in flight on this rank.
        confirm: Whether the operation also waits until its destinations have accepted what it sends, so that
            a disagreement raises on both sides at once; without it, those that only send learn of it at their
            next operation. Default is the group's option.
        timeout: Of this operation; default is the group's.

    Tensors on another device than the CPU go by messages of that device's delegate, with these differences:
    calls are matched in their order, and names do not count; wait() of a Work orders the current stream and
    does not block; `timeout` applies to the work on the host only. `confirm` compares signatures on the
    host beforehand, by name if one is given, and gathers always do: then the call itself waits, and
    raises. The first operation on a device waits until all ranks have called one.
    """

    class Options(Backend.Options):
        """The options of backend fog, for `pg_options` of torch.distributed.

        Attributes:
            confirm: As in the class, for c10d's own operations.
            between_hosts: How data goes between hosts: "auto", "rma" or "messages"; "" (default) uses
                FOG_BETWEEN_HOSTS. The choice of the first group holds for the process, and must be the same on
                all ranks.
            reduce: What sums in allreduce, reduce and reduce_scatter_tensor of a group on several hosts: "fog", or
                "mpi" for MPI's own nonblocking reductions; "" (default) uses FOG_REDUCE, or else "fog". It must be
                the same on all ranks of the group. With "mpi" the loss of a rank during a sum may end the others,
                or leaves them without MPI: see docs/launchers.md.
            group_name: The name of the group in messages.
        """

        confirm: bool
        between_hosts: str
        reduce: str
        group_name: str  # type: ignore[assignment]  # torch has a type of its own for it, which is one
        def __init__(self) -> None: ...
        def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupFog.Options: ...

    def __init__(self, store: Store, rank: int, size: int, options: ProcessGroupFog.Options) -> None:
        """Blocks until all ranks have come to `store`; the first group of a process starts MPI.

        Raises:
            ValueError: `options.between_hosts`, `options.reduce`, FOG_BETWEEN_HOSTS or FOG_REDUCE is none of the
                names, FOG_RMA_BYTES no such number, or the first group has chosen another way between hosts.
            torch.distributed.DistBackendError: Naming the ranks that did not come within the timeout, or those
                that want different ways between hosts, or different sums; or RMA was asked for and
                cannot be done here.
        """

    def neighbor_allreduce(
        self,
        tensor: Tensor | Sequence[Tensor],
        plan: NeighborPlan,
        *,
        output: Tensor | Sequence[Tensor] | None = None,
        name: str = "",
        confirm: bool | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Weighted sum of the neighbors' tensors and this rank's own; see NeighborPlan.

        Sums run in float64 for float32 and float64 and in float32 for float16 and bfloat16, and are rounded
        once. On other devices than the CPU a sender's weight other than 1 is applied before it sends, and
        rounded to the dtype.

        A list is exchanged as one: a single exchange for all tensors of one dtype, dtypes in the order in
        which they first appear. It costs no copy where the tensors of a dtype lie one after the other,
        without gaps, in one storage (views of a flat buffer, in its order), and one copy in where they do
        not; the same holds for `output`. Outputs that are made here lie so: views of one storage for each
        dtype. Lists that differ between neighbors in number, order, shapes or dtypes are an error on both
        sides. A list of one tensor is that tensor.

        Args:
            tensor: Any shape, the same on all neighbors; float16, bfloat16, float32, float64, complex64 or
                complex128. Or a list of such tensors, not empty.
            plan: Must be this rank's in this group.
            output: Takes the result, or a list of results; shapes and dtypes of `tensor`. Each shares no
                memory with `tensor`, or is the tensor in its place. Default: new tensors.

        Returns:
            A Work whose `result()` is `[output]`, or the list of outputs.
        """

    def neighbor_allreduce_blocking(
        self,
        tensor: Tensor | Sequence[Tensor],
        plan: NeighborPlan,
        output: Tensor | Sequence[Tensor] | None = None,
        name: str = "",
        confirm: bool | None = None,
        timeout: timedelta | None = None,
    ) -> list[Tensor]:
        """neighbor_allreduce, waited for: it makes no Work for Python, and wakes no other thread meanwhile.

        Returns:
            `[output]`, or the list of outputs.

        Raises:
            torch.distributed.DistBackendError: The operation failed in flight.
        """

    def hierarchical_neighbor_allreduce(
        self,
        tensor: Tensor | Sequence[Tensor],
        machines: Sequence[Sequence[int]],
        plan: NeighborPlan,
        *,
        output: Tensor | Sequence[Tensor] | None = None,
        name: str = "",
        confirm: bool | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """neighbor_allreduce between machines, each of which enters with the mean of its ranks' tensors.

        All ranks of a machine get the same bits. Each rank averages and mixes a slice of the tensor, so that
        a machine's link to another carries one tensor. Means are rounded to the dtype before they are mixed.

        Args:
            tensor: As in neighbor_allreduce.
            machines: The ranks of each machine, equally many; each rank of the group is in one machine. They
                need not be hosts. The same on all ranks.
            plan: That of this rank's machine among the machines, the same on all its ranks: its ranks are
                indices into `machines`.
            output: As in neighbor_allreduce.

        Returns:
            As in neighbor_allreduce.
        """

    def local_allreduce(
        self,
        tensor: Tensor,
        machines: Sequence[Sequence[int]],
        op: ReduceOp | ReduceOp.RedOpType,
        *,
        name: str = "",
        timeout: timedelta | None = None,
    ) -> Work:
        """c10d's allreduce, in place, among the ranks of this rank's machine only.

        Args:
            tensor: As in c10d's allreduce: every dtype for which `op` is defined.
            machines: The ranks of each machine; each rank of the group is in one machine. The order of a
                machine's ranks is that of the reduction.
            op: As in c10d's allreduce.
        """

    def neighbor_allgather(
        self,
        tensor: Tensor,
        plan: NeighborPlan,
        *,
        name: str = "",
        confirm: bool | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """The sources' tensors joined along dimension 0, in the order of the plan; its weights are not used.

        Args:
            tensor: One dimension or more; dimension 0 may differ between ranks, the others and the dtype may
                not.

        Returns:
            A Work whose `result()` is `[joined]`.
        """

    def allgather_concat(
        self, tensor: Tensor, *, name: str = "", confirm: bool | None = None, timeout: timedelta | None = None
    ) -> Work:
        """All ranks' tensors joined along dimension 0, in rank order; `tensor` as in neighbor_allgather."""

    def agree(self, sums: Tensor, *, name: str = "") -> Work:
        """Sums all ranks' uint64 numbers, modulo 2^64, in place. The caller waits for it at once.

        They are zero if the ranks agree: each rank adds the marks of its outgoing edges and subtracts those of its
        incoming edges (`fogdist.agreement`).
        """

    def allreduce_named(
        self,
        tensor: Tensor,
        op: ReduceOp | ReduceOp.RedOpType,
        *,
        name: str = "",
        timeout: timedelta | None = None,
    ) -> Work:
        """c10d's allreduce, in place, with a name."""

    def broadcast_named(
        self, tensor: Tensor, root: int, *, name: str = "", timeout: timedelta | None = None
    ) -> Work:
        """c10d's broadcast, in place, with a name; `root` is a rank of this group."""

    def create_window(
        self,
        tensor: Tensor,
        name: str,
        in_neighbors: Sequence[int],
        out_neighbors: Sequence[int],
        *,
        zero_init: bool = False,
        timeout: timedelta | None = None,
    ) -> Window:
        """Makes a one-sided window; collective over the group.

        Ranks may write to `tensor`'s slots on the others as soon as this returns. `tensor` stays the same
        tensor, but its storage moves into shared memory, as `fogdist.share_` does it.

        Args:
            tensor: Contiguous CPU tensor of integers, float16, bfloat16, float32, float64, complex64 or
                complex128; of one shape and dtype on all ranks.
            name: For messages; the same on all ranks.
            in_neighbors: Ranks that write to this one, each of which has a slot here; from these it can also
                get.
            out_neighbors: Ranks that this one writes to. `j` is an out-neighbor of `i` if and only if `i` is
                an in-neighbor of `j`.
            zero_init: Slots start as zeros; otherwise as copies of this rank's own tensor.
            timeout: Of this call; default is the group's, which is also that of the window's operations.

        Raises:
            ValueError: On all ranks, if they disagree; the group goes on. On this rank alone for a tensor or
                a rank that is none: then the others wait for it.
        """

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. torch calls it on ranks outside of a new group, as some backends need it for a split."""

    def delegate(self, device_type: str) -> Backend | None:
        """The backend that serves tensors of a type of device, such as "cuda"; None if none has been made yet."""

    @property
    def options(self) -> ProcessGroupFog.Options:
        """A copy of the group's options; changing it changes nothing."""

    @property
    def sent(self) -> tuple[int, int]:
        """How many messages the operations of this group have sent from here, and how many bytes of data in them."""
    @property
    def traffic(self) -> dict[int, dict[str, int | float]]:
        """By rank, what operations and windows have exchanged with it while `observe` was on; see `fogdist.metrics`.

        "sent_messages", "sent_bytes", "received_messages" and "received_bytes" count. "waited" are seconds from an operation's
        start to each of its messages, and "waited_last" those of them in which that message alone was missing.
        """

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of this group on this rank's host, ascending, itself included."""

    @property
    def hosts(self) -> list[int]:
        """Host index of every rank; hosts are numbered in the order of their first ranks."""

    def transport(self, rank: int) -> str:
        """How large data goes to another rank: "shared memory", "rma" or "messages".

        Raises:
            ValueError: It is no other rank of the group.
        """

class Window:
    """A tensor of each rank and a slot for each of its in-neighbors; from `create_window`.

    `put` and `accumulate` write into a slot of another rank, `get` into one of this rank's own; no other
    rank takes part. On one host they run in the caller's thread, straight in the other rank's memory;
    between hosts by messages that the other rank's engine answers. A slot's value is replaced as a whole, and no
    reader sees a half-written value. With `reset`, `update` adds each value exactly once, so nothing is lost or
    counted twice. `get` never sees a half-done `update`. It may see a part of other arithmetic of the owner,
    unless both sides hold the mutex. If a `get` and a `put` write to one slot at the same time, either may come
    last.

    Windows of device tensors do the same, with the same arguments: on the host, with copies in the order of streams.

    With each value goes p, the weight of push-sum, always of the same state: `p` is this rank's own, 1.0 at
    first, and slots start with 0.0.

    Attributes:
        p: This rank's own push-sum weight.

    Each pair of neighbors has two mutexes, one for each of them as the owner. They are fair, a thread may lock
    one again that it has, and what a rank holds is free when its process ends.

    Common arguments:
        destinations: Out-neighbors with finite weights, each once; weight 0.0 stands for zeros whatever the
            tensor holds.
        sources: The same of in-neighbors.
        with_p: p goes along, by the same weights. Otherwise the p of slots stays as it is.
        mutex: Holds, for each destination or source, the mutex that it owns with this rank; for `update` those
            that this rank owns with `neighbors`. Operations that have to wait for one run later in another thread.
        skip_lost: Leaves out ranks that are known to have gone. Otherwise these fail the Work, after all
            others have been served.
        timeout: For mutexes and for other hosts' replies; default is that of the group.

    Raises:
        ValueError: Ranks that are no such neighbors, weights that are not finite, another shape or dtype.
        torch.distributed.DistBackendError: Naming operation, window and rank; from `Work.wait()`, and at once
            if the window was freed or its group destroyed. The group and other windows go on.
    """

    p: float
    def put(
        self,
        tensor: Tensor,
        destinations: Sequence[tuple[int, float]],
        *,
        self_weight: float = 1.0,
        with_p: bool = False,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
    ) -> Work:
        """Slot `[destination][this rank]` becomes weight * tensor, and its version one more.

        Args:
            tensor: Of the window's shape and dtype; it may be the window's own. It must not change until the
                Work is complete, which it is on return but for other hosts and for mutexes that others hold.
            self_weight: What `tensor`, and p if `with_p`, are multiplied by in place before the Work is complete.
                They are not if it fails. Integers are rounded as those that are sent.
        """

    def accumulate(
        self,
        tensor: Tensor,
        destinations: Sequence[tuple[int, float]],
        *,
        self_weight: float = 1.0,
        with_p: bool = False,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
    ) -> Work:
        """Adds weight * tensor to slot `[destination][this rank]`; its version stays. Otherwise as `put`."""

    def get(
        self,
        sources: Sequence[tuple[int, float]],
        *,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
    ) -> Work:
        """Slot `[this rank][source]` becomes weight * the source's tensor, and its version one more."""

    def update(
        self,
        self_weight: float,
        neighbors: Sequence[tuple[int, float]],
        *,
        reset: bool = False,
        clone: bool = False,
        mutex: bool = False,
        with_p: bool = False,
        timeout: timedelta | None = None,
    ) -> Tensor:
        """self_weight * tensor + the sum of weight * slot `[this rank][neighbor]`; versions start at 0 again.

        Args:
            self_weight: Finite; with 0.0 the tensor's content does not matter.
            neighbors: In-neighbors with finite weights. They may be gone: their slots are here.
            reset: These slots are zeros afterwards, and their p 0.0 if `with_p`.
            clone: Returns a new tensor, and the window's stays as it is.

        Returns:
            The window's tensor, changed in place, or the clone.
        """

    def write(
        self, tensor: Tensor, destination: int, offset: int, *, timeout: timedelta | None = None
    ) -> Work:
        """Copies into the destination's tensor itself, past slots: c10d::Window's put, from torch 2.14 on.

        Nothing keeps readers from seeing half of it; `signal` says that it is there.

        Args:
            tensor: Of the window's dtype; any shape that fits.
            destination: An out-neighbor.
            offset: Element of the destination's flat tensor where it begins.
        """

    def signal(self, destination: int, *, timeout: timedelta | None = None) -> Work:
        """Sends an out-neighbor a signal, which comes after the data of this rank's earlier `write`s."""

    def wait_signal(self, source: int, *, timeout: timedelta | None = None) -> Work:
        """Takes one signal of an in-neighbor; the Work waits for it."""

    def map_remote(self, rank: int) -> Tensor | None:
        """A neighbor's tensor where it is; None if it is on another host. It keeps the window."""

    def version(self, rank: int) -> int:
        """How many puts and gets the slot of this in-neighbor has taken since the last `update`; at most 2**24 - 1."""

    def slot_p(self, rank: int) -> float:
        """The p of the value in the slot of this in-neighbor; a value without p does not change it."""

    def is_gone(self, rank: int) -> bool:
        """Whether a neighbor takes no further part: its process has ended, or it has closed the group."""

    def lock(self, ranks: Sequence[int], *, own: bool = False, timeout: timedelta | None = None) -> None:
        """Takes mutexes, in one order on all ranks; all of them or none.

        Args:
            ranks: In- or out-neighbors, which own the mutexes.
            own: This rank owns them, and each of `ranks` is the other of the pair.
        """

    def unlock(self, ranks: Sequence[int], *, own: bool = False) -> None:
        """Gives them back; ValueError, and nothing given back, if this thread does not have them all."""

    def hold(
        self, ranks: Sequence[int], *, own: bool = False, timeout: timedelta | None = None
    ) -> WindowHold:
        """Takes mutexes as `lock` does, until the returned object releases them."""

    def free(self, timeout: timedelta | None = None) -> None:
        """Waits for this rank's operations in flight and until all neighbors have called it; ranks that are gone do not
        count. Afterwards the window does nothing more. The tensor stays."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> str:
        """How this rank's operations reach its neighbors: those of "shared memory", "rma" and "messages" that there are, with
        " and " between; or "staged"."""

    def transport_to(self, rank: int) -> str:
        """How they reach this neighbor: one of these, "staged, by rma" or "staged, by messages"."""
    @property
    def in_neighbors(self) -> list[int]: ...
    @property
    def out_neighbors(self) -> list[int]: ...

class WindowHold:
    def release(self) -> None:
        """Gives the mutexes back; once more does nothing."""

def set_version(version: str) -> None:
    """Tells the extension the package's version, before `load_mpi`; ranks of a job must have the same one."""

def choose_mpi(path: str) -> None:
    """Says which MPI library `load_mpi` opens. Once one is open, another call does nothing.

    Args:
        path: The argument of dlopen; not used if `native_mpi`.
    """

def load_mpi() -> None:
    """Opens the MPI library without starting MPI. Ranks that have to use MPI do so themselves.

    Raises:
        RuntimeError: If it cannot be opened or does not follow the MPI standard ABI.
    """

def mpi_library() -> str:
    """Path of the library that was chosen; empty if none was."""

def mpi_version() -> str:
    """The result of MPI_Get_library_version; needs an open library."""

def launcher_world() -> tuple[int, int] | None:
    """Rank and size that mpiexec or srun gave this process; None if neither or torchrun started it."""

def start_from_launcher(timeout: timedelta) -> tuple[int, int]:
    """Starts MPI with the help of the launcher, without a Store; returns rank and size.

    Raises:
        torch.distributed.DistBackendError: If there is no launcher or MPI does not start within `timeout`.
    """

def empty_shared(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in memory that the host's other ranks can map; see `fogdist.empty`."""

def share(tensor: Tensor) -> None:
    """Moves the tensor's storage into such memory; see `fogdist.share_`."""

def is_shared(tensor: Tensor) -> bool:
    """Whether all of the tensor's storage is in such memory."""

def protocol() -> str:
    """The facts that must be the same on all ranks of a job: the versions of fog, torch and MPI, and the protocol's number and
    layout."""

def arena_bytes(memory: int, local_ranks: int, addresses: int) -> int:
    """How large the memory that a rank shares may become.

    Args:
        memory: Bytes of memory of the host.
        local_ranks: How many ranks map each other's.
        addresses: Bytes of addresses that a process may have.
    """

class Rendezvous:
    """For tests: how ranks meet in a Store, as every group does."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None: ...
    def allgather(self, key: str, value: str) -> list[str]:
        """Every rank's value."""

    def finish(self) -> None:
        """Tells that this rank needs nothing of it any more; the last rank that calls it deletes the exchanged data."""

class VirtualWorld:
    """For tests: ranks of one process, each with an engine and a group of its own, which exchange messages through its memory.

    They have no threads: operations that were started move when `progress` is called. Windows go by messages.

    Args:
        size: How many ranks.
        ranks_per_host: Every so many consecutive ranks pretend to share a host.
        hosts: The number of each rank's host, instead.
        timeout: Of operations.
        confirm: Whether senders wait until receivers have accepted their messages, see `ProcessGroupFog.Options`.
        seed: Of the delays.
        most_delay: How many rounds a message may be late, so that those of different ranks overtake each other.
    """

    def __init__(
        self,
        size: int,
        *,
        ranks_per_host: int = 1,
        hosts: Sequence[int] = (),
        timeout: timedelta = ...,
        confirm: bool = False,
        seed: int = 0,
        most_delay: int = 0,
    ) -> None: ...
    @property
    def sent(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Messages of operations, and their bytes, from rank to rank."""
    @property
    def groups(self) -> list[ProcessGroupFog]:
        """The group of each rank."""

    def progress(self) -> None:
        """Drives all ranks until nothing moves and no message is on its way."""

    @property
    def failures_told(self) -> list[int]:
        """Messages that tell of failures, by the rank that sent them."""

    def record(self) -> None:
        """Has `recorded` remember the messages of operations from now on, and forget those of before."""

    def recorded(self) -> tuple[list[tuple[int, int, int, int, int, int]], list[list[int]]]:
        """What a model of the network can replay.

        Returns:
            The messages in the order in which they left: sender, receiver, bytes, key of the operation, which message of the
            operation between these two ranks, and how many messages had come to the sender by then; and for each rank the places
            in this list of those that have come to it, in that order.
        """

    def lose(self, rank: int, *, noticed: bool = True) -> None:
        """Ends a rank without a goodbye, as if its process had been killed; the others notice at once, or not at all."""

def emulate(*, page_bytes: int = 0, memory_bytes: int = 0, host_id: str = "", protocol: str = "") -> None:
    """For tests: lets this process take itself for one of another machine, or of another build. Before anything is shared.

    Args:
        page_bytes: Of a page of memory; a multiple of the real one. 0: as it is.
        memory_bytes: Of the machine's memory. 0: as it is.
        host_id: What tells hosts apart as far as names can; "" as it is.
        protocol: What `protocol` says; "" as it is.
    """

def set_delegate_factory(
    device_type: str, make: Callable[[Store, int, int, Backend.Options, torch.device, bool], Backend] | None
) -> None:
    """Sets what makes a group's backend for tensors of a type of device.

    It is called when a first such tensor comes, with the group's store, rank, size and options, the tensor's device and whether
    all ranks come together. Only if they do may it communicate. It holds for all groups of the process.

    Args:
        device_type: Such as "cuda".
        make: None for no backend.
    """

def bookkeeping() -> dict[str, int]:
    """Sizes of tables of this process that must not grow for ever, for tests.

    Returns:
        "names" of operations that groups remember, "closed_groups" that other ranks have not closed, "early_bytes" of messages that
        came before their operation, "deferred_windows" that were dropped and whose memory neighbors may still use.
    """

def broadcast_from_rank_zero(text: str, timeout: timedelta) -> str:
    """Rank 0's text on every rank of the launcher's world; after start_from_launcher.

    Args:
        text: At most 511 bytes; used on rank 0 only.
        timeout: Of the call.
    """

def start_timeline(prefix: str, rank: int, size: int) -> None:
    """Records what the engine does in the file ``prefix<rank>.json``; see `fogdist.timeline`.

    Raises:
        ValueError: There is a timeline already, or the file cannot be written.
    """

def stop_timeline() -> None:
    """Ends the timeline and completes its file; does nothing without one."""

def timeline_path() -> str:
    """The timeline's file; empty without one."""

def timeline_is_on() -> bool:
    """Whether a timeline is being recorded."""

def add_to_timeline(track: str, name: str, begin: int, end: int) -> None:
    """Adds a slice; times are those of ``time.monotonic_ns``. Does nothing without a timeline."""

def observe_as(rank: int, size: int) -> None:
    """Says which rank of how many this process is, for the timeline and the flight record; only the first call counts.

    Raises:
        ValueError: FOG_TIMELINE is set and its file cannot be written.
    """

def observe(on: bool) -> None:
    """Operations that begin from now on are counted in `ProcessGroupFog.traffic`; as many calls with False end that."""

def read_flight_record(pid: int) -> dict[str, object]:
    """What the operations of a process of this host did last; see `fogdist.flight_record`.

    Raises:
        ValueError: There is no such process, or it has no group of fog, or of another version.
    """

def shutdown() -> None:
    """Fails what is in flight, says goodbye to the other ranks and ends MPI; for interpreter exit."""
