"""Tests of c10d's other operations: sparse sums, monitored barriers, splits."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import WorldPool, on_ranks, sizes
from reference import Checks
from torch import Tensor

CPU = torch.device("cpu")
SHORT = timedelta(seconds=1)


# Sparse tensors


def sparse_input(rank: int, kind: str) -> Tensor:
    """Returns a tensor whose entries differ in place and number between ranks; some places occur twice."""
    generator = torch.Generator().manual_seed(100 + rank)
    entries = 0 if kind == "empty on odd ranks" and rank % 2 else 3 + rank
    rows = torch.randint(0, 6, (entries,), generator=generator)
    columns = torch.randint(0, 4, (entries,), generator=generator)
    if kind == "hybrid":  # each entry is a row
        values = torch.randint(-8, 8, (entries, 4), generator=generator).double()
        return torch.sparse_coo_tensor(rows[None], values, (6, 4))
    dtype = torch.int64 if kind == "integers" else torch.float32
    values = torch.randint(-8, 8, (entries,), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (6, 4))


@on_ranks(sizes([1, 3], [2]), kind=["floats", "integers", "hybrid", "empty on odd ranks"])
def test_sparse_allreduce(kind: str) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = sum(sparse_input(source, kind).to_dense() for source in range(size))
    with Checks() as checks:
        tensor = sparse_input(rank, kind)
        dist.all_reduce(tensor)
        checks.equal("in place", [tensor.to_dense()], [expected])
        checks.true("coalesced", tensor.is_coalesced())
        tensor = sparse_input(rank, kind)
        work = dist.all_reduce(tensor, async_op=True)
        (result,) = work.get_future().wait()
        checks.true(
            "the Future's value is the tensor", result is tensor or torch.equal(result.to_dense(), expected)
        )


@on_ranks(2)
def test_sparse_allreduce_refuses() -> None:
    tensor = sparse_input(dist.get_rank(), "floats")
    with pytest.raises(ValueError, match="op: got MAX; allowed is SUM"):
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    ones = torch.ones(2)
    dist.all_reduce(ones)  # this would be out of step if the refused call had sent anything
    assert ones.tolist() == [dist.get_world_size()] * 2


@on_ranks(2)
def test_sparse_allreduce_names_both_shapes() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    tensor = torch.sparse_coo_tensor([[0], [1]], [1.0], (6, 4 + dist.get_rank()))
    text = r"allreduce_sparse\(SUM, int64\[1, 6, [45]\]\).*\[1, 6, [45]\]\)"
    with pytest.raises(dist.DistBackendError, match=text):
        dist.all_reduce(tensor, group=group)


# Monitored barriers


@on_ranks(sizes([1, 3], [2, 4]), wait_all_ranks=[False, True])
def test_monitored_barrier(wait_all_ranks: bool) -> None:
    for _ in range(3):
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=wait_all_ranks)
    dist.monitored_barrier()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))


@on_ranks(3)
def test_monitored_barrier_holds_everybody() -> None:
    store = dist.PrefixStore("monitored", dist.distributed_c10d._get_default_store())
    if dist.get_rank() == 1:
        time.sleep(0.3)
        store.set("came", "yes")
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    assert store.check(["came"])


def miss_monitored_barrier(absent: list[int], wait_all_ranks: bool) -> str:
    group = dist.new_group()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    came = {
        r: f"rank {r} has its error in {group.group_name}"
        for r in range(dist.get_world_size())
        if r not in absent
    }
    if rank in absent:
        store.wait(list(came.values()))
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(group, SHORT, wait_all_ranks)
    store.set(came[rank], "")
    return str(caught.value)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_monitored_barrier_names_who_is_missing(worlds: WorldPool, wait_all_ranks: bool) -> None:
    texts = worlds(4).run(miss_monitored_barrier, [1, 3], wait_all_ranks, timeout=40)
    names = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
    assert f"{names} failed to pass monitoredBarrier in 1000 ms" in texts[0]
    assert "Rank 2 successfully reached monitoredBarrier" in texts[2]
    assert "not there: ranks 1, 3" in texts[2]  # from the report of rank 0
    for text in worlds(4).run(miss_monitored_barrier, [0], wait_all_ranks, timeout=40)[1:]:
        assert "not there: rank 0" in text


@on_ranks(2)
def test_monitored_barrier_arguments() -> None:
    with pytest.raises(ValueError, match="timeout: got 0 ms"):
        dist.group.WORLD.monitored_barrier(timedelta(0))
    with pytest.raises(TypeError, match="timeout.*got s"):
        dist.monitored_barrier(timeout="soon")
    dist.monitored_barrier(timeout=20.0)  # torch still takes seconds


# Splits and merges


@on_ranks(sizes([3], [2]))
def test_split_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    with Checks() as checks:
        for members in ([0, 1], [size - 1], list(range(size))):
            child = world.split_group(members, timeout=timedelta(seconds=21))
            checks.true(f"{members}: only members get a group", (child is not None) == (rank in members))
            if child is not None:
                checks.true(f"{members}: size", child.size() == len(members))
                checks.true(f"{members}: rank", child.rank() == members.index(rank))
                tensor = torch.tensor([float(rank)])
                child.allreduce([tensor]).wait()
                checks.true(f"{members}: sum", tensor.item() == sum(members))
                timeouts = [group._get_backend(CPU).options._timeout for group in (child, world)]
                checks.true(f"time-outs {timeouts}", timeouts == [timedelta(seconds=t) for t in (21, 30)])
        # A split can be split again, with ranks of the parent.
        child = world.split_group(list(range(size)))
        grandchild = child.split_group([1, size - 1] if size > 2 else [1])
        if grandchild is not None:
            tensor = torch.tensor([float(rank)])
            grandchild.allreduce([tensor]).wait()
            checks.true("grandchild", tensor.item() == (1 + size - 1 if size > 2 else 1))
        total = torch.ones(1)
        dist.all_reduce(total)
        checks.true("the parent goes on", total.item() == size)


@on_ranks(2)
def test_split_refuses() -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.supports_splitting
    with pytest.raises(RuntimeError):  # torch's own check
        dist.group.WORLD.split_group([0, 0])
    backend.options._timeout = timedelta(seconds=1)  # changes a copy only
    assert backend.options._timeout == timedelta(seconds=30)
    backend.perform_nocolor_split(CPU)


@on_ranks(3)
def test_merge() -> None:
    """Merges two groups of this world into one, with another store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("merge", dist.distributed_c10d._get_default_store())
    halves = [dist.new_group([0]), dist.new_group(list(range(1, size)))]
    mine = halves[0] if rank == 0 else halves[1]
    merged = mine.merge_remote_group(store, size, timedelta(seconds=20), "both")
    tensor = torch.tensor([float(merged.rank() + 1)])
    merged.allreduce([tensor]).wait()
    assert tensor.item() == 6.0


# Memory of an accelerator


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@on_ranks(1)
def test_without_an_accelerator_no_backend_allocates_its_memory() -> None:
    """FSDP2 asks this, also with a torch for GPUs on a machine without one."""
    assert not dist.group.WORLD._get_backend(CPU).supports_tensor_alloc(CPU)  # type: ignore[union-attr]
