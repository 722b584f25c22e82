"""Types of the C++ extension, whose bindings are in csrc/process_group_fog/backend/.

`fog_pg._extension.load` loads the extension and chooses the MPI library. Without that call only NeighborPlan and Codec
work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, ReduceOp, Store, Work

# The torch that the extension was compiled for, as in torch/version.h: "2.13.0".
torch_version: str
# Whether the extension is linked with a site's own MPI (FOG_MPICXX) instead of opening an ABI library.
native_mpi: bool

class NeighborPlan:
    """The peers and weights of one rank in a neighbor exchange; immutable.

    The rank's result is `sum(w * x_j for j, w in sources) + self_weight * x`. x_j is source j's tensor, multiplied by
    the weight for this rank in the destinations of j's own plan. Sums run in the order of `sources`.

    Args:
        rank: This rank in the group.
        size: Number of ranks in the group.
        self_weight: Weight of this rank's own tensor.
        sources: Ranks that this rank receives from, with weights.
        destinations: Ranks that this rank sends to, with weights.
        mean: Divides the sum by `len(sources) + 1` instead of weighting its terms; all weights must be 1.0.

    Raises:
        ValueError: If a rank is out of range, is this rank itself or occurs twice, if a weight is not finite, or
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
    def self_weight(self) -> float: ...
    @property
    def sources(self) -> list[tuple[int, float]]: ...
    @property
    def destinations(self) -> list[tuple[int, float]]: ...
    def __repr__(self) -> str: ...

class Codec:
    """A codec with its parameters; immutable. `fogdist.compression` describes them and checks the types of arguments.

    The functions that make codecs raise ValueError for a parameter out of its range.
    """

    @staticmethod
    def float16() -> Codec: ...
    @staticmethod
    def bfloat16() -> Codec: ...
    @staticmethod
    def int8(block: int) -> Codec: ...
    @staticmethod
    def top_k(fraction: float, k: int, bits: int) -> Codec: ...
    @property
    def text(self) -> str:
        """The name and the parameters, which ranks compare."""

    def bytes(self, dtype: torch.dtype, numel: int) -> int:
        """The size of a message."""

    def encode(self, tensor: Tensor, message: Tensor) -> None:
        """Encodes into `message`, of dtype uint8, on the host: tensors of other devices are copied.

        Raises:
            ValueError: The codec does not take the dtype; the message has another size.
        """

    def decode(self, message: Tensor, output: Tensor) -> None:
        """Decodes into `output`, whose shape and dtype are those of the encoded tensor.

        Raises:
            ValueError: The message has another size, or is not valid.
        """

class ProcessGroupFog(Backend):
    """The backend object of one group, with all operations of c10d and the operations below.

    Operations are asynchronous: each returns a Work at once. For errors in flight (a peer that is lost or late,
    ranks that disagree), `Work.wait()` raises torch.distributed.DistBackendError. Wrong arguments raise
    ValueError or TypeError in the call, before anything is sent.

    Common arguments:
        name: Rendezvous key of the operation, so that ranks may issue named operations in different orders.
            Without a name the key is the operation's place in the program. Raises ValueError if an operation of
            the same kind and name is in flight on this rank.
        confirm: Whether the operation also waits until its destinations have accepted the data, so that
            a disagreement raises on both sides at once. Without it, ranks that only send learn of a disagreement
            at their next operation. The default is the group's option.
        timeout: Timeout of this operation; the default is the group's.

    Tensors on other devices than the CPU use messages of the device's delegate, with these differences: calls are
    matched by their order, regardless of names; wait() of a Work makes the current stream wait and does not block;
    `timeout` only applies to the work on the host. With `confirm`, the ranks first compare signatures on the host,
    by name if one is given; gathers always do. In this case the call itself waits, and raises. The first operation
    on a device waits until all ranks have called an operation on it. Exchanges with a codec are those of the CPU, of
    copies of the tensors.

    Attributes:
        lost_after: The least seconds without a sign of life after which a rank that still runs is declared lost; 0:
            never. It holds for all groups of the process, and is FOG_LOST_AFTER at first: docs/hangs.md. Setting it to
            a number other than 0 and 1 to 1,000,000 raises ValueError.
    """

    lost_after: float

    class Options(Backend.Options):
        """The options of backend fog, for `pg_options` of torch.distributed.

        Attributes:
            confirm: As in the class, for c10d's own operations.
            group_name: The name of the group in error messages.
        """

        confirm: bool
        group_name: str  # type: ignore[assignment]  # torch declares a subtype of str
        def __init__(self) -> None: ...
        def __deepcopy__(self, memo: dict[int, object]) -> ProcessGroupFog.Options: ...

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: ProcessGroupFog.Options,
        known: ProcessGroupFog | None = None,
        known_ranks: Sequence[int] = [],
    ) -> None:
        """Blocks until all ranks have come to `store`; the first group of a process starts MPI if it is to move data.

        Args:
            store: The group's.
            rank: This rank.
            size: The number of ranks.
            options: A copy stays with the group.
            known: An older group of this process that contains all ranks of the new one, if there is one. The wait
                then ends with an error as soon as one of them is known to be gone.
            known_ranks: Their ranks in it.

        Raises:
            ValueError: `known_ranks` are not different ranks of `known`, one for each rank.
            torch.distributed.DistBackendError: Some ranks did not come within the timeout, or will not come because they
                are gone; ranks have different values of FOG_BETWEEN_HOSTS (the error names the ranks), or RMA was requested
                and is not available.
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
        compression: Codec | None = None,
        decoded: Tensor | Sequence[Tensor] | None = None,
        conserve: bool = False,
    ) -> Work:
        """Weighted sum of the neighbors' tensors and this rank's own; see NeighborPlan.

        Sums run in float64 for float32 and float64 and in float32 for float16 and bfloat16, and are rounded
        once. On other devices than the CPU, a sender's weight other than 1 is applied before sending, and the
        product is rounded to the dtype.

        All tensors of one dtype in a list are exchanged together; the dtypes are in the order of their first
        appearance. If the tensors of a dtype are contiguous in one storage (views of a flat buffer, in its
        order), they are not copied; otherwise they are copied once. The same holds for `output`. New outputs are
        views of one storage per dtype. It is an error on both sides if the lists of neighbors differ in the
        number, order, shapes or dtypes of their tensors. A list with one tensor is the same as that tensor.

        Args:
            tensor: A tensor of any shape, the same on all neighbors, and of dtype float16, bfloat16, float32,
                float64, complex64 or complex128; or a non-empty list of such tensors.
            plan: This rank's plan in this group.
            output: The tensor, or list of tensors, for the result, with the shapes and dtypes of `tensor`. Each
                must share no memory with `tensor`, or be the same tensor. Default: new tensors.
            compression: Encodes the messages; the same on all neighbors, for tensors on the CPU. The sum is that of the
                decoded tensors of the sources, and of this rank's own as it is.
            decoded: The tensor, or list of tensors, for the decoded own message, which is then the own term too.
            conserve: Whether to compute ``x + sum_j w_j d_j - (1 - self_weight) d`` with decoded tensors d, so that the
                sum over all ranks stays what it would be without compression. Not together with `decoded`.

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
        """neighbor_allreduce that waits, without a codec. It creates no Python Work and wakes no other thread.

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
        compression: Codec | None = None,
        conserve: bool = False,
    ) -> Work:
        """neighbor_allreduce between machines; each machine contributes the mean of its ranks' tensors.

        All ranks of a machine get the same bits. Each rank averages and mixes a slice of the tensor, so the link
        between two machines carries one tensor. Means are rounded to the dtype before they are mixed.

        Args:
            tensor: As in neighbor_allreduce.
            machines: The ranks of each machine, the same number for each; each rank of the group is in one machine.
                A machine can be different from a host. The same on all ranks.
            plan: The plan of this rank's machine, whose ranks are indices into `machines`; the same on all ranks
                of the machine.
            output: As in neighbor_allreduce.
            compression: As in neighbor_allreduce, between machines: each rank encodes the slice of the mean that it
                sends.
            conserve: As in neighbor_allreduce, for the sum over all machines.

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
        """Concatenates the sources' tensors along dimension 0, in the order of the plan; its weights are not used.

        Args:
            tensor: A tensor with at least one dimension. Ranks may differ in dimension 0, but not in the other
                dimensions and the dtype.

        Returns:
            A Work whose `result()` is `[concatenated]`.
        """

    def allgather_concat(
        self, tensor: Tensor, *, name: str = "", confirm: bool | None = None, timeout: timedelta | None = None
    ) -> Work:
        """Concatenates all ranks' tensors along dimension 0, in rank order; `tensor` as in neighbor_allgather."""

    def agree(self, sums: Tensor, *, name: str = "") -> Work:
        """Sums all ranks' uint64 numbers, modulo 2^64, in place. The caller must wait for the Work at once.

        The sums are zero if the ranks agree: each rank adds the marks of its outgoing edges and subtracts the marks of
        its incoming edges (`fogdist.agreement`).
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
        """Creates a one-sided window; collective over the group.

        Ranks may write to the other ranks' slots as soon as this call returns. `tensor` stays the same object,
        but its storage moves into shared memory, as with `fogdist.share_`.

        Args:
            tensor: Contiguous tensor of integers, float16, bfloat16, float32, float64, complex64 or complex128;
                with the same shape and dtype on all ranks.
            name: For error messages; the same on all ranks.
            in_neighbors: Ranks that write to this rank. Each has a slot here, and this rank can also get from it.
            out_neighbors: Ranks that this rank writes to. `j` is an out-neighbor of `i` if and only if `i` is
                an in-neighbor of `j`.
            zero_init: Slots start as zeros; otherwise as copies of this rank's own tensor.
            timeout: Timeout of this call; the default is the group's, which is also the default of the window's
                operations.

        Raises:
            ValueError: The ranks disagree: raised on all ranks, and the group stays usable. Or an argument has an
                invalid type or rank: raised on this rank only, and the other ranks wait for it.
        """

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing. torch calls it on ranks outside of a new group, because some backends need it for a split."""

    def delegate(self, device_type: str) -> Backend | None:
        """The backend that serves tensors of a device type such as "cuda"; None if it has not been created yet."""

    @property
    def options(self) -> ProcessGroupFog.Options:
        """A copy of the group's options; changing it has no effect on the group."""

    @property
    def sent(self) -> tuple[int, int]:
        """The number of messages that this rank's operations in the group have sent, and of bytes of data in them."""
    @property
    def traffic(self) -> dict[int, dict[str, int | float]]:
        """By rank: the exchanges of operations and windows with it while `observe` was on; see `fogdist.metrics`.

        "sent_messages", "sent_bytes", "received_messages" and "received_bytes" are counters. "waited" are the seconds
        from an operation's start to each message of that rank, and "waited_last" the part of them during which only
        that message was missing.
        """

    def part(
        self, ranks: Sequence[int], number: int, store: Store, options: ProcessGroupFog.Options
    ) -> ProcessGroupFog:
        """A group of some of this group's ranks over the same engine; this group may have failed.

        Nothing is sent and no rank waits: each of `ranks` must make the same call.

        Args:
            ranks: This rank and others. The index in `ranks` is the rank in the new group.
            number: A number that was not used before with this group.
            store: For backends of devices, such as NCCL.
            options: The new group's.

        Raises:
            ValueError: A rank is out of range or given twice, or this rank is not among them.
        """

    def watch(self, ranks: Sequence[int]) -> None:
        """Makes the ends of these ranks known to this one, also if it exchanges nothing with them."""

    @property
    def id(self) -> int:
        """The group's identity: the same on all its ranks, and of no other group."""

    @property
    def failure(self) -> str:
        """Why the group refuses work; empty if it does not."""

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of this group on this rank's host, including this rank, in ascending order."""

    @property
    def hosts(self) -> list[int]:
        """Host index of every rank; hosts are numbered in the order of their first ranks."""

    def transport(self, rank: int) -> str:
        """How large data travels to another rank: "shared memory", "rma", "rma, exchanges only" or "tcp".

        Where several TCP connections carry it: "tcp: 2 connections, round trip 40.1 ms, 930 Mbit/s".

        Raises:
            ValueError: `rank` is not another rank of the group.
        """

    def lost_ranks(self) -> list[int]:
        """The ranks of the group that are lost, in ascending order.

        Their processes have ended without a goodbye, or do not answer, or were declared lost (docs/hangs.md). A rank
        that has ended in good order is not lost. Takes a few microseconds.
        """

    def silent_ranks(self) -> list[int]:
        """The lost ranks whose processes may still run, in ascending order.

        Nothing has come from them for too long, or the connection has broken and it could not be found out whether their
        processes have ended. The system has reported the end of the other lost ranks. A silent rank is still lost, but no
        longer silent, when that is reported later.
        """

    def left_ranks(self) -> list[int]:
        """The ranks that have closed the group, or whose process has ended in good order, in ascending order."""

    def suspect_ranks(self) -> list[int]:
        """The ranks that this rank waits for or shares a window with, and that show no sign of life for long.

        This is half of the time after which such a rank is declared lost, if that is allowed: docs/hangs.md.
        """

class Window:
    """A tensor of each rank and a slot for each of its in-neighbors; from `create_window`.

    `put` and `accumulate` write into a slot of another rank, `get` into a slot of this rank; the programs of other
    ranks take no part. On one host they run in the caller's thread, directly in the other rank's memory. Between
    hosts they are messages that the other rank's engine answers, or one-sided operations of the network. A slot's
    value is replaced as a whole, and readers never see a partially written value. With `reset`, `update` adds each
    value exactly once, so no value is lost or counted twice. `get` never sees a partial `update`. It may see a part
    of the owner's other arithmetic on the tensor, unless both sides hold the mutex. If a `get` and a `put` write to
    one slot at the same time, either may come last.

    Windows of device tensors behave in the same way. They work on the host, with copies in the order of streams.

    Each value comes with p, the push-sum weight, which always belongs to the same state. `p` is this rank's own
    weight, initially 1.0; slots start with 0.0.

    Attributes:
        p: This rank's own push-sum weight.

    Each pair of neighbors has two mutexes; each of the two ranks owns one. The mutexes are fair, a thread may lock
    a mutex again that it holds, and the mutexes of a rank are released when its process ends.

    Common arguments:
        destinations: Out-neighbors with finite weights, each at most once. Weight 0.0 sends zeros, whatever the
            tensor contains.
        sources: In-neighbors with weights, in the same way.
        with_p: Sends p as well, with the same weights. Otherwise the p of the slots stays unchanged.
        mutex: Holds the mutex of each destination or source with this rank during the operation; for `update` the
            mutexes of this rank with `neighbors`. Operations that have to wait for a mutex run later in another
            thread.
        skip_lost: Skips ranks that are known to have gone. Otherwise these ranks fail the Work, after all other
            ranks have been served.
        timeout: Timeout for mutexes and for replies of other hosts; the default is the group's.

    Raises:
        ValueError: A rank is not a neighbor of the right kind, a weight is not finite, or the shape or dtype is wrong.
        torch.distributed.DistBackendError: The operation failed; the error names operation, window and rank. Raised by
            `Work.wait()`, or at once if the window was freed or its group destroyed. The group and other windows
            stay usable.
    """

    p: float
    def put(
        self,
        tensor: Tensor,
        destinations: Sequence[tuple[int, float]],
        self_weight: float = 1.0,
        with_p: bool = False,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
        waits: bool = False,
    ) -> Work:
        """Sets slot `[destination][this rank]` to weight * tensor, and increments its version.

        Args:
            tensor: A tensor of the window's shape and dtype; it may be the window's own. It must not change until
                the Work is complete. The Work is complete on return, except for destinations on other hosts and
                for mutexes that other ranks hold.
            self_weight: Factor for `tensor`, and for p if `with_p`; they are multiplied in place before the Work is
                complete, unless the Work fails. Integers are rounded as in the sent values.
            waits: The caller waits for the Work next, so no other thread is woken for it.
        """

    def accumulate(
        self,
        tensor: Tensor,
        destinations: Sequence[tuple[int, float]],
        self_weight: float = 1.0,
        with_p: bool = False,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
        waits: bool = False,
    ) -> Work:
        """Adds weight * tensor to slot `[destination][this rank]` without a new version. Otherwise as `put`."""

    def get(
        self,
        sources: Sequence[tuple[int, float]],
        *,
        mutex: bool = False,
        skip_lost: bool = False,
        timeout: timedelta | None = None,
        waits: bool = False,
    ) -> Work:
        """Sets slot `[this rank][source]` to weight * the source's tensor, and increments its version."""

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
        """Computes self_weight * tensor + the sum of weight * slot `[this rank][neighbor]`; versions restart at 0.

        Args:
            self_weight: Finite; with 0.0 the tensor's content does not matter.
            neighbors: In-neighbors with finite weights. They may have gone, because their slots are on this rank.
            reset: Sets these slots to zero, and their p to 0.0 if `with_p`.
            clone: Returns a new tensor, and leaves the window's tensor unchanged.

        Returns:
            The window's tensor, changed in place, or the clone.
        """

    def write(
        self, tensor: Tensor, destination: int, offset: int, *, timeout: timedelta | None = None
    ) -> Work:
        """Copies into the destination's tensor itself, not into a slot: c10d::Window's put, from torch 2.14 on.

        Readers may see a partial write; `signal` tells the destination when the data is there.

        Args:
            tensor: A tensor of the window's dtype and any shape that fits.
            destination: An out-neighbor.
            offset: Element of the destination's flat tensor at which the write begins.
        """

    def signal(self, destination: int, *, timeout: timedelta | None = None) -> Work:
        """Sends an out-neighbor a signal, which comes after the data of this rank's earlier `write`s."""

    def wait_signal(self, source: int, *, timeout: timedelta | None = None) -> Work:
        """Takes one signal of an in-neighbor; the Work waits for it."""

    def map_remote(self, rank: int) -> Tensor | None:
        """A neighbor's tensor in place; None if it is on another host. The result keeps the window alive."""

    def version(self, rank: int) -> int:
        """The number of puts and gets into this in-neighbor's slot since the last `update`; at most 2**24 - 1."""

    def slot_p(self, rank: int) -> float:
        """The p of the value in this in-neighbor's slot; a value without p leaves it unchanged."""

    def is_gone(self, rank: int) -> bool:
        """Returns whether a neighbor takes no further part: its process has ended, or it has closed the group."""

    def hold(
        self, ranks: Sequence[int], *, own: bool = False, timeout: timedelta | None = None
    ) -> WindowHold:
        """Locks mutexes until the returned object releases them.

        It locks them in the same order on all ranks, and all of them or none.

        Args:
            ranks: In- or out-neighbors, which own the mutexes.
            own: Locks the mutexes that this rank owns with `ranks` instead.
        """

    def free(self, timeout: timedelta | None = None) -> None:
        """Waits for this rank's operations in flight, and until all neighbors that have not gone have called it.

        Afterwards the window cannot be used any more. The tensor stays valid.
        """

    @property
    def tensor(self) -> Tensor: ...
    @property
    def name(self) -> str: ...
    @property
    def transport(self) -> str:
        """How this rank's operations reach its neighbors: the used ones of "shared memory", "rma" and "messages",
        joined by " and "; "staged" for device tensors.
        """

    def transport_to(self, rank: int) -> str:
        """How they reach this neighbor: one of these words, "staged, by rma" or "staged, by messages"."""
    @property
    def in_neighbors(self) -> list[int]: ...
    @property
    def out_neighbors(self) -> list[int]: ...

class WindowHold:
    def release(self) -> None:
        """Unlocks the mutexes; a second call does nothing. Raises ValueError in another thread than `hold`'s."""

def set_version(version: str) -> None:
    """Sets the package's version, before `load_mpi`; all ranks of a job must have the same version."""

def choose_mpi(path: str) -> None:
    """Sets the MPI library that `load_mpi` opens. Does nothing once a library is open.

    Args:
        path: The argument of dlopen; not used if `native_mpi`.
    """

def load_mpi() -> None:
    """Opens the MPI library without starting MPI. Otherwise the library is opened when ranks have to use MPI.

    Raises:
        RuntimeError: If it cannot be opened or does not follow the MPI standard ABI.
    """

def job_secret() -> str:
    """The secret of this process's job; "" if there is none yet.

    Raises:
        ValueError: FOG_JOB_SECRET is too short.
    """

def set_job_secret(secret: str) -> None:
    """Sets the secret of a process that has none."""

def announced() -> int:
    """How often processes that want to join have asked for this process's attention. It costs no system call."""

def own_entry() -> str:
    """What another process needs to connect with this one; "" if none can, because there is no world yet, or MPI runs."""

def read_entry(entry: str) -> dict[str, Any]:
    """The properties of the process with this entry.

    `host_name`; `addresses`, at which it listens for other hosts; and `is_visible`, whether it shares this host and its
    memory, so that `announce` never waits.
    """

def announce(entry: str) -> bool:
    """Asks the process with this entry for its attention; False if it has ended, or does not answer.

    A process that is not visible (`read_entry`) is called over TCP, which may take seconds.
    """

def prepare_to_join(rank: int, size: int, entries: Sequence[str], store: Store, timeout: timedelta) -> None:
    """Makes this process a rank of the job of the processes with these entries, without a connection to any.

    Raises:
        torch.distributed.DistBackendError: They are of another build, or cannot be reached.
        ValueError: The job cannot have that rank.
    """

def add_whole(
    id: int, rank: int, hosts: Sequence[int], reason: str, store: Store, options: ProcessGroupFog.Options
) -> ProcessGroupFog:
    """The job's first group on a process that joins. It refuses all work, with this reason.

    Args:
        hosts: The number of each rank's host when the job started.
    """

def send_membership(rank: int, epoch: int, payload: bytes) -> bool:
    """Sends a message about the job's members to another rank; does not wait, and needs no group that works.

    Messages of one sender stay in order. They are lost if a rank ends, if it has no group, and if its program does not take
    them: the oldest give way to new ones beyond 4,096 messages or 16 MiB.

    Args:
        rank: Of the job: in this process's first group, or of a process that has joined.
        epoch: That this rank knows; for the receiver's answer (`answer_membership`).
        payload: At most 1 MiB.

    Returns:
        False if there is no way to that rank, if it is lost or has left, or if it does not read: 16 MiB wait for it.

    Raises:
        ValueError: `rank` is this one, or no rank that the job can have; `epoch` is negative; `payload` is too long.
    """

def take_membership() -> list[tuple[int, bytes]]:
    """The messages of `send_membership` that have come, with the ranks of their senders, in the order of each sender."""

def wait_membership(timeout_s: float) -> bool:
    """Waits until `take_membership` has something to return; False after `timeout_s`, or when the process ends.

    A hang of the program is still seen while a thread other than the main one waits here (docs/hangs.md).

    Raises:
        ValueError: `timeout_s` is negative or not a number.
    """

def answer_membership(epoch: int, payload: bytes) -> None:
    """Sets what is sent at once to each rank whose message tells an epoch up to `epoch`, while the program does anything.

    It replaces an earlier answer, and ends with the process's last group. The message comes to `take_membership` as well.
    An answer comes as a message does, and is not answered.

    Raises:
        ValueError: As for `send_membership`.
    """

def connect_with(entries: Mapping[int, str], is_member: bool, timeout: timedelta) -> list[int]:
    """Connects this process with others, which do the same.

    Args:
        entries: The entries of the others, by their ranks in the first group.
        is_member: Whether this process is a member of the job already, and the others join.
        timeout: The others are lost if they do not come within it.

    Returns:
        The ranks that have come.
    """

def mpi_version() -> str:
    """The result of MPI_Get_library_version; needs an open library."""

class Settings:
    """What the environment says; `fog_pg._settings` fills it."""

    between_hosts: str
    interface: str
    job_secret: str
    timeline: str
    local_links: bool
    connections: int
    rma_bytes: int
    host_timeout: int
    warn_after: int
    lost_after: int
    max_ranks: int
    local_ranks: int
    launcher_size: int
    launcher_rank: int

def set_settings(settings: Settings) -> None:
    """Sets what groups that are made from now on use."""

def start_from_launcher(timeout: timedelta) -> tuple[int, int]:
    """Starts MPI with the help of the launcher, without a Store; returns rank and size.

    Raises:
        torch.distributed.DistBackendError: If there is no launcher or MPI does not start within `timeout`.
    """

def empty_shared(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in memory that the host's other ranks can map; see `fogdist.empty`."""

def share(tensor: Tensor) -> None:
    """Moves the tensor's storage into shared memory; see `fogdist.share_`."""

def is_shared(tensor: Tensor) -> bool:
    """Returns whether all of the tensor's storage is in shared memory."""

def protocol() -> str:
    """The properties that all ranks of a job must share: the versions of fog and torch, and the number and layout of
    the protocol.
    """

def hmac_sha256(key: bytes, data: bytes) -> bytes:
    """For tests: the HMAC with SHA-256."""

def arena_bytes(memory: int, local_ranks: int, addresses: int) -> int:
    """The largest size of the memory that a rank shares.

    Args:
        memory: The host's memory in bytes.
        local_ranks: Number of ranks that map each other's memory.
        addresses: Size of a process's address space in bytes.
    """

def usual_gap(samples: Sequence[tuple[float, float]]) -> float:
    """For tests: median + 6 MAD of gaps, weighted by the length of their periods.

    Args:
        samples: The longest gap of each period, and the period, in seconds.
    """

class Liveness:
    """For tests: the judgement on peers that show no sign of life, with times that the caller chooses."""

    def __init__(self, lost_after: float) -> None: ...
    def watch(self, peer: int, end: float, program: bool) -> None:
        """Watches a peer until `end`; with `program`, its program too."""

    def judge(
        self, now: float, paused: bool, signs: Mapping[int, tuple[int, int, bool, float, float]]
    ) -> dict[int, str]:
        """Returns the peers that are lost, and why.

        Args:
            now: The time.
            paused: Whether this process's own program pauses.
            signs: Of each peer: beats, calls, whether its program is excused, its usual gap, the age of its oldest
                operation.
        """

    def suspects(self, peer: int) -> bool: ...

class Growth:
    """For tests: how many additional TCP connections data to a peer takes, with times that the caller chooses."""

    used: int
    rate: float

    def begin(self) -> None:
        """Data begins to wait."""

    def look(
        self, now: float, written: int, least_round_trip: float, round_trip: float, limited: float
    ) -> bool:
        """Returns whether to ask for another connection.

        Args:
            now: The time in seconds, as all others.
            written: The bytes that all connections have written by now.
            least_round_trip: Of the first connection.
            round_trip: Its present one.
            limited: For how long, by now, all that it may hold was in flight.
        """

    def on_open(self) -> None:
        """An additional connection is open."""

class Rendezvous:
    """For tests: the rendezvous of ranks in a Store, which every group uses."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        gone: Callable[[Sequence[int]], dict[int, str]] | None = None,
    ) -> None: ...
    def allgather(self, key: str, value: str) -> list[str]:
        """Every rank's value."""

    def finish(self) -> None:
        """Ends this rank's use; the last rank that calls it deletes the exchanged data."""

class VirtualWorld:
    """For tests: ranks of one process. Each has its own engine and group; they exchange messages through memory.

    They have no threads: operations only make progress when `progress` is called. Windows use messages. If a `wire`
    is named, they have the threads of processes: each may be used by a thread of its own, and `close` ends them.

    Args:
        size: Number of ranks.
        ranks_per_host: This number of consecutive ranks share a virtual host.
        hosts: If not empty, the number of each rank's host instead.
        timeout: Timeout of operations.
        confirm: Whether senders wait until receivers have accepted their messages, see `ProcessGroupFog.Options`.
        seed: Seed of the delays.
        most_delay: The most rounds that a message may be late, so that messages of different ranks overtake each other.
        wire: With threads, what carries the messages: `"in process"`, `"memory"` (of one host) or `"tcp"`.
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
        wire: str = "",
    ) -> None: ...
    def close(self) -> None:
        """Ends the ranks and their threads."""

    @property
    def sent(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The messages of operations, and their bytes, by pair of ranks."""
    @property
    def groups(self) -> list[ProcessGroupFog]:
        """The group of each rank."""

    def progress(self) -> None:
        """Drives all ranks until there is no progress and no message is in flight."""

    @property
    def failures_told(self) -> list[int]:
        """The number of failure messages, by the rank that sent them."""

    def lose(self, rank: int, *, noticed: bool = True) -> None:
        """Ends a rank without a goodbye, as if its process were killed; the others notice at once, or never."""

def emulate(
    *,
    page_bytes: int = 0,
    memory_bytes: int = 0,
    host_id: str = "",
    protocol: str = "",
    longest_sleep: timedelta | None = None,
) -> None:
    """For tests: makes this process behave like a process of another machine, or of another build.

    Must be called before anything is shared.

    Args:
        page_bytes: Size of a memory page; a multiple of the real size. 0: unchanged.
        memory_bytes: Size of the machine's memory. 0: unchanged.
        host_id: The name that distinguishes hosts; "" leaves it unchanged.
        protocol: The result of `protocol`; "" leaves it unchanged.
        longest_sleep: How long a thread sleeps that waits for an operation and is not woken.
    """

def set_delegate_factory(
    device_type: str, make: Callable[[Store, int, int, Backend.Options, torch.device, bool], Backend] | None
) -> None:
    """Sets the function that creates a group's backend for tensors of a device type, in all groups of the process.

    It is called for the first tensor of that type, with the group's store, rank, size and options, the tensor's device,
    and whether all ranks call it together. Only in that case may it communicate.

    Args:
        device_type: Type of device, such as "cuda".
        make: The function; None for no backend.
    """

def bookkeeping() -> dict[str, int]:
    """For tests: sizes of this process's tables, which must not grow without limit.

    Returns:
        "names": operation names that groups remember; "closed_groups": groups that other ranks have not closed;
        "early_bytes": bytes of messages that came before their operation; "deferred_windows": dropped windows whose
        memory neighbors may still use.
    """

def with_engine_locked(call: Callable[[], object]) -> None:
    """Calls a function while this thread holds the engine's lock, for tests."""

def broadcast_from_rank_zero(text: str, timeout: timedelta) -> str:
    """Returns rank 0's text on every rank of the launcher's world. Call after start_from_launcher.

    Args:
        text: At most 511 bytes; used on rank 0 only.
        timeout: Timeout of the call.
    """

def start_timeline(prefix: str, rank: int, size: int) -> None:
    """Records this process's operations in the file ``prefix<rank>.json``; see `fogdist.timeline`.

    Raises:
        ValueError: A timeline is being recorded already, or the file cannot be written.
    """

def stop_timeline() -> None:
    """Ends the timeline and completes its file; does nothing without a timeline."""

def timeline_path() -> str:
    """The timeline's file; empty without a timeline."""

def timeline_is_on() -> bool:
    """Returns whether a timeline is being recorded."""

def add_to_timeline(track: str, name: str, begin: int, end: int) -> None:
    """Adds a slice; times are those of ``time.monotonic_ns``. Does nothing without a timeline."""

def observe_as(rank: int, size: int, script: str) -> None:
    """Sets this process's rank, size and the name of its program for the timeline and the flight record; only the first call has an effect.

    Raises:
        ValueError: FOG_TIMELINE is set and its file cannot be written.
    """

def observe(on: bool) -> None:
    """Counts operations that begin from now on in `ProcessGroupFog.traffic`, until a matching call with False."""

def note_step() -> None:
    """Counts a step of this process's training in the flight record, which `fog top` reads. Before the first group it
    does nothing.
    """

def note_job(job: int) -> None:
    """Tells the flight record which job this process is in: the id of its first group."""

def note_epoch(epoch: int) -> None:
    """Shows the epoch of the membership in the flight record, as `note_step`."""

def note_staleness(exchanges: Sequence[tuple[int, int]]) -> None:
    """Shows there how many exchanges old the values of ranks are, as pairs of a rank of the job and a number."""

def read_flight_record(pid: int) -> dict[str, object]:
    """Reads the record of the last operations of a process on this host; see `fogdist.flight_record`.

    Raises:
        ValueError: There is no such process, or it has no record, or the record is of another version of fog.
    """

def suspend_detection(on: bool) -> None:
    """Begins a time without calls of fog that is no hang, or ends it; see `fogdist.suspend_detection`."""

def init_logging() -> None:
    """Reads TORCH_CPP_LOG_LEVEL, as torch does when it is imported."""

def shutdown() -> None:
    """Fails operations in flight, says goodbye to the other ranks and ends MPI; for interpreter exit."""
