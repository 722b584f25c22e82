"""Types of the C++ extension; csrc/process_group_fog/bindings.cpp is what they describe.

The extension is loaded by `fog_pg._extension.load`, which also opens the MPI library. Without that only
NeighborPlan works.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    Operations are asynchronous: each returns a Work at once. Errors in flight (a peer that is lost or late,
    ranks that disagree) come out of `Work.wait()` as torch.distributed.DistBackendError; wrong arguments are
    a ValueError or TypeError here, before anything is sent.

    Common arguments:
        name: Rendezvous key of the operation, so that ranks may issue named operations in different orders.
            Without one the key is the operation's place in the program. ValueError if an operation of the
            same kind and name is in flight on this rank.
        confirm: Whether the operation also waits until its destinations have accepted what it sends, so that
            a disagreement raises on both sides at once; without it, those that only send learn of it at their
            next operation. Default is the group's option.
        timeout: Of this operation; default is the group's.
    """

    class Options(Backend.Options):
        """What `pg_options` of torch.distributed takes for backend fog.

        Attributes:
            confirm: As in the class, for c10d's own operations.
            group_name: How messages name the group.
        """

        confirm: bool
        group_name: str
        def __init__(self) -> None: ...
        def __deepcopy__(self, memo: dict) -> ProcessGroupFog.Options: ...

    def __init__(self, store: Store, rank: int, size: int, options: ProcessGroupFog.Options) -> None:
        """Blocks until all ranks have come to `store`; the first group of a process starts MPI.

        Raises:
            torch.distributed.DistBackendError: Naming the ranks that did not come within the timeout.
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
        waits: bool = False,
    ) -> Work:
        """Weighted sum of the neighbors' tensors and this rank's own; see NeighborPlan.

        Sums run in float64 for float32 and float64 and in float32 for float16 and bfloat16, and are rounded
        once.

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
            waits: Whether the caller goes straight on to wait; then no other thread is woken for what comes
                before that.

        Returns:
            A Work whose `result()` is `[output]`, or the list of outputs.
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

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: what torch calls on ranks outside of a new group, which some backends need for a split."""

    @property
    def options(self) -> ProcessGroupFog.Options:
        """A copy of the group's options; changing it changes nothing."""

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of this group on this rank's host, ascending, itself included."""

    @property
    def hosts(self) -> list[int]:
        """Host index of every rank; hosts are numbered in the order of their first ranks."""

def load_mpi(path: str) -> None:
    """Opens the MPI library without starting MPI. Once one is open, another call does nothing.

    Args:
        path: What dlopen takes; not used if `native_mpi`.

    Raises:
        RuntimeError: If it cannot be opened or does not follow the MPI standard ABI.
    """

def mpi_library() -> str:
    """Path of the library that is open; empty if none is."""

def mpi_version() -> str:
    """What MPI_Get_library_version says; needs an open library."""

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

def broadcast_from_rank_zero(text: str) -> str:
    """Rank 0's text on every rank of the launcher's world; after start_from_launcher.

    Args:
        text: At most 511 bytes; used on rank 0 only.
    """

def shutdown() -> None:
    """Fails what is in flight, says goodbye to the other ranks and ends MPI; for interpreter exit."""
