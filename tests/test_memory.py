"""Tests of tensors in memory that a host's ranks share: exchanges of them, and the life of the memory."""

from __future__ import annotations

import os
import resource
import signal

import fogdist
import fogdist.bluefog.torch as bf
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import on_ranks, sizes
from operations import COLLECTIVES, prepare
from reference import Checks, make_input, mix

from fog_pg import _C

MIB = 1 << 20
# Sizes around the limits at which another algorithm is used, in float32 elements.
SIZES = [0, 1, 8 * 1024, 8 * 1024 + 1, 100_003, 3 * MIB // 4]


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return fogdist.empty(tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# --- exchanges ----------------------------------------------------------------------------------------------


@on_ranks(sizes([3], [2, 4]))
def test_exchanges_read_shared_memory_as_any_other() -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    with Checks() as checks:
        for name in ("ring", "exp2", "full"):
            graph = topologies.by_name(name, size)
            fogdist.set_topology(graph)
            matrix = topologies.mixing_matrix(graph)
            for dtype in (torch.float32, torch.bfloat16, torch.complex128):
                for numel in SIZES:
                    inputs = [make_input(r, dtype, (numel,)) for r in range(size)]
                    expected = fogdist.neighbor_allreduce(inputs[rank])
                    checks.close(f"ordinary {name} {dtype} {numel}", expected, mix(inputs, matrix)[rank])
                    mine = shared(inputs[rank])
                    label = f"shared {name} {dtype} {numel}"
                    checks.equal(label, fogdist.neighbor_allreduce(mine), expected)
                    checks.equal(f"{label} input", mine, inputs[rank])
                    # Only some ranks' memory is shared, and only a part of a tensor is sent.
                    some = mine if rank % 2 else inputs[rank]
                    checks.equal(f"{label} on some", fogdist.neighbor_allreduce(some), expected)
                    longer = shared(torch.cat([inputs[rank], inputs[rank]]))
                    checks.equal(f"{label} part", fogdist.neighbor_allreduce(longer[numel:]), expected)
                    # Results that travel with their message need no shared memory.
                    travels = mine.nbytes <= 32 << 10
                    checks.true(f"{label} result", _C.is_shared(fogdist.neighbor_allreduce(mine)) != travels)


@on_ranks(4)
def test_collectives_take_shared_tensors() -> None:
    with Checks() as checks:
        for seed, operation in enumerate(COLLECTIVES):
            for numel in (1000, 300_007):
                ready = prepare(operation, torch.float32, (numel,), seed=seed)
                for output in ready.outputs:
                    fogdist.share_(output)
                    checks.true("moved", _C.is_shared(output))
                ready.start(False)
                ready.verify(checks, f"{operation} of {numel}")


@on_ranks(4)
def test_memory_is_used_again_only_when_nobody_reads_it() -> None:
    """Each round's result is the input of the next, while the memory of the previous round is reused."""
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    fogdist.set_topology(topologies.ring(size))
    matrix = topologies.mixing_matrix(topologies.ring(size))
    state = np.random.default_rng(3).random((size, 50_000))
    mine = shared(torch.from_numpy(state[rank].copy()))
    for _ in range(50):
        mine = fogdist.neighbor_allreduce(mine)
        state = matrix.T @ state
    torch.testing.assert_close(mine, torch.from_numpy(state[rank]), rtol=1e-12, atol=0)


@on_ranks(4, in_shared_memory=[True, False])
def test_more_in_flight_than_offers(in_shared_memory: bool) -> None:
    fogdist.init()
    rank, size = fogdist.rank(), fogdist.size()
    # just too large to be sent with the header; each rank has two destinations
    numel, rounds = 8 * 1024 + 8, 1500
    make = fogdist.empty if in_shared_memory else torch.empty
    sources = [*fogdist.in_neighbor_ranks(), rank]
    handles = [bf.neighbor_allreduce_nonblocking(make(numel).fill_(rank + i)) for i in range(rounds)]
    # Messages between two ranks keep their order while some of them wait for an offer.
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(make(numel if i % 2 else 3).fill_(i), after) for i in range(50)]
    arrived = [torch.empty(numel if i % 2 else 3) for i in range(50)]
    for tensor in arrived:
        dist.recv(tensor, before)
    for send in sends:
        send.wait()
    with Checks() as checks:
        mean = sum(sources) / len(sources)
        for i, handle in enumerate(handles):
            output = bf.wait(handle)
            checks.true(f"exchange {i}", bool(output.sub(mean + i).abs().max() < 1e-3))
        for i, tensor in enumerate(arrived):
            checks.true(f"message {i}", bool(tensor.eq(i).all()))


def lose_a_reader() -> str:
    fogdist.init(topologies.fully_connected)
    dist.barrier()
    if fogdist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError) as caught:
        for _ in range(1000):
            fogdist.neighbor_allreduce(fogdist.empty(MIB).fill_(1.0), enable_topo_check=False)
    fogdist.empty(MIB).fill_(2.0)  # the offered memory is free again
    return str(caught.value)


def test_a_lost_reader_is_an_error(new_world):
    outcomes = new_world(3, timeout=30).run_raw(lose_a_reader)
    for rank in (0, 2):
        assert "rank 1" in outcomes[rank].value, outcomes[rank]


# --- the memory itself --------------------------------------------------------------------------------------


def test_empty_is_a_tensor_as_any_other():
    tensor = fogdist.empty(3, np.int64(4), dtype=torch.float16)
    assert tensor.shape == (3, 4)
    assert tensor.dtype is torch.float16
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert _C.is_shared(tensor)
    assert fogdist.empty([2, 5]).shape == fogdist.empty((2, 5)).shape == (2, 5)
    assert fogdist.empty(()).shape == fogdist.empty().shape == ()
    assert fogdist.empty(2).dtype is torch.get_default_dtype()
    assert fogdist.empty(0).numel() == 0
    tensor.fill_(2.0)
    assert tensor.resize_(40, 4)[:3].eq(2.0).all()


def test_wrong_arguments():
    for call, error, message in [
        (lambda: fogdist.empty((2, -1)), ValueError, r"size\[1\] must be 0 or more, got -1"),
        (lambda: fogdist.empty(2.5), TypeError, r"size\[0\] must be an integer, got 2.5"),
        (lambda: fogdist.empty(2**63), ValueError, r"size\[0\] must be at most 9223372036854775807"),
        (lambda: fogdist.empty(2, dtype="float32"), TypeError, "dtype must be a torch.dtype, got str"),
        (lambda: fogdist.share_([1.0]), TypeError, "tensor must be a torch.Tensor, got list"),
        (lambda: fogdist.share_(torch.ones(2).to_sparse()), TypeError, "layout torch.sparse_coo"),
        (
            lambda: fogdist.share_(torch.ones(2, device="meta")),
            ValueError,
            "must be on the CPU, got device meta",
        ),
        (lambda: fogdist.share_(torch.ones(2).share_memory_()), ValueError, "torch.multiprocessing"),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_share_moves_a_parameter_its_gradient_and_its_views():
    layer = torch.nn.Linear(5, 4)
    weight, before = layer.weight, layer.weight.detach().clone()
    view = weight.detach()[1:]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    assert fogdist.share_(weight) is weight
    assert _C.is_shared(weight)
    assert torch.equal(weight, before)
    assert view.data_ptr() == weight[1:].data_ptr()
    address = weight.data_ptr()
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert torch.equal(weight, before - 2.0)
    assert torch.equal(view, weight[1:])
    assert fogdist.share_(weight).data_ptr() == address  # it is in shared memory already


def test_share_leaves_arrays_of_numpy_their_memory():
    # large enough that its memory would be returned to the system
    tensor = torch.arange(MIB, dtype=torch.float32)
    array = tensor.numpy()
    fogdist.share_(tensor)
    assert _C.is_shared(tensor)
    tensor.fill_(7.0)
    assert np.array_equal(array, np.arange(MIB))
    array[:] = 3.0
    assert tensor.eq(7.0).all()
    owned = np.ones(MIB, dtype=np.float32)
    moved = fogdist.share_(torch.from_numpy(owned))
    del owned
    assert _C.is_shared(moved) and moved.eq(1.0).all()


def test_tensors_do_not_overlap():
    sizes = [1, 15, 16, 17, 1000, 4096, 5000, 100_000]
    tensors = [fogdist.empty(size).fill_(place) for place, size in enumerate(sizes * 3)]
    del tensors[::4]
    more = [fogdist.empty(size).fill_(100 + place) for place, size in enumerate(sizes * 2)]
    kept = [place for place in range(len(sizes) * 3) if place % 4]
    assert all(tensor.eq(place).all() for place, tensor in zip(kept, tensors, strict=True))
    assert all(tensor.eq(100 + place).all() for place, tensor in enumerate(more))


def test_freed_memory_is_used_again():
    fogdist.empty(4 * MIB).fill_(1.0)
    before = resident_bytes()
    for _ in range(50):
        fogdist.empty(4 * MIB).fill_(1.0)
    assert resident_bytes() - before < 16 * MIB


def test_much_freed_memory_goes_back_to_the_system():
    before = resident_bytes()
    blocks = [fogdist.empty(16 * MIB).fill_(1.0) for _ in range(12)]  # 64 MiB each
    assert resident_bytes() - before > 600 * MIB
    del blocks  # blocks are freed one by one: at first as much is kept as is in use
    assert resident_bytes() - before < 300 * MIB


def test_a_forked_child_leaves_its_parents_memory_alone():
    kept = fogdist.empty(MIB).fill_(1.0)
    freed = fogdist.empty(MIB).fill_(1.0)
    child = os.fork()
    if child == 0:
        del freed  # this must not free it in the parent
        own = fogdist.empty(MIB).fill_(2.0)
        os._exit(0 if not _C.is_shared(own) and own.eq(2.0).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.eq(1.0).all()
    assert freed.eq(1.0).all()
