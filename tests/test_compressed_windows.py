"""Compressed puts and accumulates: slots hold the decoded tensors, bit for bit, over every way between ranks."""

from __future__ import annotations

import functools
import random
from datetime import timedelta
from pathlib import Path

import fogdist
import fogdist.bluefog.torch as bf
import pytest
import torch
import torch.distributed as dist
from codec_bounds import bound_of
from fogdist import topology
from fogdist.compression import BFloat16, Codec, Float16, Int8, TopK
from harness import error_of, on_ranks
from hosts import run_on_hosts
from reference import Checks, make_input
from test_compressed_exchanges import DTYPES, weighted
from test_window_guarantees import check_order
from torch import Tensor
from window_interfaces import INTERFACES, AnyWindow, WorldsByWay, create, pids, slot, stopped

WAYS = ["memory", "tcp", "rma"]
CODECS: list[Codec] = [
    Float16(),
    BFloat16(),
    Int8(),
    Int8(block=8192),
    TopK(0.02),
    TopK(k=3),
    TopK(0.12345678901234567, bits=2),
]


# --- the contents of slots ------------------------------------------------------------------------------------


def contents(codec: Codec, dtypes: list[torch.dtype], numels: list[int]) -> None:
    """Two ranks write to each other, with weights, with p, and with shares that they keep."""
    rank = dist.get_rank()
    other = 1 - rank
    with Checks() as checks:
        for number, (dtype, numel) in enumerate((d, n) for d in dtypes for n in numels):
            what = f"{codec} {dtype} {numel}"
            x = [make_input(r, dtype, numel) for r in range(2)]
            own = x[rank].clone()
            window = create(own.clone(), f"w{number}", zero_init=True)
            mine = torch.full_like(own, 5)

            def exchanged(tensor: Tensor) -> Tensor:
                """Returns the other rank's tensor."""
                parts = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(parts, tensor)
                return parts[other]

            window.p = 3.0
            write = functools.partial(window.put, compression=codec.backend, decoded=mine)
            write(own, [(other, 0.75)], with_p=True).wait()
            theirs = exchanged(mine)
            checks.equal(f"{what}: the tensor stays", own, x[rank])
            checks.true(f"{what}: a put is a version", window.version(other) == 1)
            checks.true(f"{what}: p", window.slot_p(other) == 2.25)
            expected = weighted([(0.75, theirs)])
            checks.equal(f"{what}: put", slot(window, other), expected)
            alone = codec.decode(codec.encode(x[other]), x[other].shape, dtype)
            checks.equal(f"{what}: as the codec by itself", theirs, alone)
            bound = bound_of(codec, x[other])
            checks.true(f"{what}: bound", bool(((theirs.double() - x[other].double()).abs() <= bound).all()))
            dist.barrier()

            write = functools.partial(window.accumulate, compression=codec.backend, decoded=mine)
            write(own, [(other, -0.5)], with_p=True, self_weight=0.25).wait()
            theirs = exchanged(mine)
            expected = weighted([(1.0, expected), (-0.5, theirs)])
            checks.equal(f"{what}: accumulate", slot(window, other), expected)
            checks.true(f"{what}: no version", window.version(other) == 0)
            checks.true(f"{what}: p is added", window.slot_p(other) == 0.75)
            checks.equal(f"{what}: kept", own, weighted([(1.0, x[rank]), (-0.75, mine)]))
            checks.true(f"{what}: p is kept", window.p == 0.75)
            dist.barrier()

            taken = window.update(0.0, [(other, 1.0)], reset=True, clone=True, with_p=True)
            checks.equal(f"{what}: taken", taken, expected)
            dist.barrier()
            write(own, [(other, 1.0)]).wait()
            theirs = exchanged(mine)
            checks.equal(f"{what}: into an empty slot", slot(window, other), theirs)
            dist.barrier()
            write(own, [(other, 0.0)]).wait()
            window.put(own, [(other, 0.0)], compression=codec.backend, skip_lost=True, mutex=True).wait()
            dist.barrier()
            checks.equal(f"{what}: weight 0", slot(window, other), torch.zeros_like(own))
            dist.barrier()
            window.free()


@pytest.mark.parametrize("way", WAYS)
def test_slots_hold_the_decoded_tensors(world_of: WorldsByWay, way: str) -> None:
    world = world_of(way, 2)
    for codec in CODECS:
        world.run(contents, codec, [torch.float32], [0, 1, 100, 5000, 300_001])
    for codec in (Int8(), TopK(0.3)):
        world.run(contents, codec, DTYPES, [1, 777])


@pytest.mark.parametrize("way", WAYS)
def test_the_order_of_the_calls_counts(world_of: WorldsByWay, way: str) -> None:
    """Puts and accumulates with and without a codec come in the order of the calls, though their ways differ."""
    for number, with_p in enumerate(("all", "accumulates", "some")):
        for seed in range(4):
            check_order(world_of(way), INTERFACES[(number + seed) % 3], seed, 3000, with_p, BFloat16())


def late_put() -> None:
    """Rank 1 is stopped, so a compressed put is late, and a put without a codec comes before it."""
    rank = dist.get_rank()
    pid = pids()[1]
    window = create(torch.zeros(1000), zero_init=True)
    assert window.transport == "rma"
    write = functools.partial(window.put, torch.ones(1000), [(1, 1.0)], compression=Float16().backend)
    if rank == 0:
        write().wait()
        with stopped(pid):
            assert "timed out" in error_of(write(timeout=timedelta(seconds=0.2)).wait)
            window.put(torch.full((1000,), 2.0), [(1, 1.0)]).wait()
        window.accumulate(torch.full((1000,), 0.5), [(1, 1.0)]).wait()  # comes after the late message
    dist.barrier()
    if rank == 1:
        assert torch.equal(slot(window, 0), torch.full((1000,), 2.5))
    dist.barrier()
    window.free()


def test_a_late_put_does_not_replace_a_later_one(world_of: WorldsByWay) -> None:
    world_of("rma", 2).run(late_put)


def shares(interface: str, numel: int, codec: Codec) -> tuple[float, float]:
    """Sends random shares that sum to one, at random times; returns the changes of the sums over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chance = random.Random(rank)
    x = make_input(rank, torch.float64, numel)
    window = AnyWindow(interface, x, topology.exponential)
    options = {"compression": codec.backend if interface == "_C" else codec}
    for _ in range(100):
        parts = [chance.random() for _ in range(1 + len(window.destinations))]
        own, *given = (part / sum(parts) for part in parts)
        to = dict(zip(window.destinations, given, strict=True))
        window.accumulate(x, to, keep=own, p=True, mutex=chance.random() < 0.3, **options)
        if chance.random() < 0.5:
            window.update(1.0, reset=True, p=True, mutex=chance.random() < 0.3)
    dist.barrier()
    window.update(1.0, reset=True, p=True)
    p = torch.tensor([window.p], dtype=torch.float64)
    dist.all_reduce(p)
    dist.all_reduce(x)
    window.free()
    before = sum(make_input(other, torch.float64, numel) for other in range(size))
    return (x - before).abs().max().item(), abs(p.item() - size)


@pytest.mark.parametrize("way", WAYS[:2])
def test_the_sum_is_conserved_whatever_the_codec_loses(world_of: WorldsByWay, way: str) -> None:
    for interface, codec in (("_C", Int8()), ("object", TopK(0.05)), ("name", TopK(0.05, bits=2))):
        for values, p in world_of(way).run(shares, interface, 3000, codec):
            assert values < 1e-9 and p < 1e-12, codec


def carried() -> None:
    x = torch.arange(1000, dtype=torch.float32)
    x[3], x[600] = float("nan"), float("inf")
    other = 1 - dist.get_rank()
    for number, codec in enumerate((Int8(), Float16(), TopK(0.1), TopK(0.1, bits=2))):
        window = create(x.clone(), f"n{number}", zero_init=True)
        mine = torch.zeros_like(x)
        window.accumulate(x, [(other, 0.5)], compression=codec.backend, decoded=mine).wait()
        dist.barrier()
        found = slot(window, other)
        torch.testing.assert_close(found, 0.5 * mine, rtol=0, atol=0, equal_nan=True)
        assert found[3].isnan() and not found[600].isfinite()
        dist.barrier()
        window.free()


@pytest.mark.parametrize("way", WAYS[:2])
def test_nan_and_infinity_arrive(world_of: WorldsByWay, way: str) -> None:
    world_of(way, 2).run(carried)


def different_codecs() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    codecs = [Int8(), TopK(0.12345678901234567, bits=2)]
    x = make_input(0, torch.float32, 1000)
    for number, write in enumerate(("put", "accumulate")):
        window = create(x.clone(), f"d{number}", zero_init=True)
        getattr(window, write)(x, [(other, 1.0)], compression=codecs[rank].backend).wait()
        dist.barrier()
        assert torch.equal(slot(window, other), codecs[other].decode(codecs[other].encode(x), x.shape))
        dist.barrier()
        window.free()


@pytest.mark.parametrize("way", WAYS)
def test_ranks_may_have_different_codecs(world_of: WorldsByWay, way: str) -> None:
    world_of(way, 2).run(different_codecs)


# --- bad input ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments_raise_before_anything_is_sent() -> None:
    fogdist.init(topology.ring)
    other = 1 - fogdist.rank()
    x = torch.ones(10)
    window = fogdist.Window(x, name="x", zero_init=True)
    for write in (window.put, window.accumulate):
        with pytest.raises(TypeError, match="compression must be a codec.*8"):
            write(x, compression=8)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="decoded: got a tensor without compression"):
            write(x, decoded=torch.ones(10))
        for wrong in (torch.ones(9), torch.ones(10, dtype=torch.float64), torch.ones(20)[::2]):
            with pytest.raises(ValueError, match="decoded"):
                write(x, compression=Int8(), decoded=wrong)
    for function in (bf.win_put, bf.win_accumulate):
        with pytest.raises(TypeError, match="compression"):
            function(x, "x", compression="Int8")  # type: ignore[arg-type]
    integers = fogdist.Window(torch.ones(10, dtype=torch.int64), name="integers")
    with pytest.raises(ValueError, match=r"compression: got Int8\(block=256\) for dtype int64"):
        integers.put(integers.tensor, compression=Int8())
    dist.barrier()
    assert window.version(other) == 0
    assert torch.equal(slot(window._open(), other), torch.zeros(10))
    dist.barrier()
    assert bf.win_put(x, "x", compression=Int8())
    assert bf.win_wait(bf.win_accumulate_nonblocking(x, "x", compression=Int8()))
    dist.barrier()
    torch.testing.assert_close(slot(window._open(), other), 2 * x, rtol=0.01, atol=0)
    dist.barrier()
    bf.win_free()


# --- between hosts --------------------------------------------------------------------------------------------


def test_compressed_puts_take_the_bytes_of_their_codec(tmp_path: Path) -> None:
    calls = [("measure_windows", [32 << 20])]
    environment = {"FOG_BETWEEN_HOSTS": "tcp"}
    for (found,) in run_on_hosts(tmp_path, [0, 1], "exchange_bytes", calls, environment=environment):
        for name, (promised, counts) in found.items():
            assert all(promised <= count <= 1.02 * promised for count in counts), (name, promised, counts)
