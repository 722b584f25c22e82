"""Windows of device tensors promise what those of CPU tensors do (test_window_guarantees.py), on the device double.

Each promise is one function that the ranks of a world run, once over peer memory and once staged through the host: the driver's
double shares device memory between processes, unless it is told that it cannot. tests/gpu runs some of them on GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import device_double
import fogdist
import networkx as nx
import pytest
import torch
import torch.distributed as dist
from device_double import DEVICE, held
from fogdist import topology as topologies
from harness import BACKEND
from hosts import run_on_hosts

from fog_pg import _C, _driver

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="windows of backend fog")


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_double: None) -> None:
    """Ranks have no time to compile the driver either."""
    device_double.compile_driver()


TRANSPORTS = ["peer memory", "staged"]
RACE_SECONDS = 0.4
KIB = 1 << 10
DTYPES = [
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "int8",
    "int32",
    "int64",
    "uint8",
]
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED


def one_way(size: int) -> nx.DiGraph:
    """Rank 0 writes to all others."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from((0, rank) for rank in range(1, size))
    return graph


def start(transport: str, topology: Callable[[int], nx.DiGraph] = topologies.FullyConnectedGraph) -> str:
    """Begins a test on a rank: fogdist, and a device that does or does not share its memory. Returns the device."""
    fogdist.init(topology)
    choose(transport)
    device = (
        f"{used['type']}:{int(os.environ.get('LOCAL_RANK', fogdist.rank())) % accelerator().device_count()}"
    )
    accelerator().set_device(device)
    return device


def choose(transport: str) -> None:
    """Lets windows that are made from now on have a transport."""
    if used["type"] == DEVICE:
        device_double.load()
        driver = device_double.load_driver()
        driver.device_double_fail(
            b"cuIpcOpenMemHandle_v2", 0 if transport == "peer memory" else NOT_SUPPORTED
        )
    elif transport == "staged":  # in a process that has compiled no kernels; the driver locks pages as ever
        _C.set_device_driver(used["type"], _driver.DRIVER, [])


used = {"type": DEVICE}  # by the ranks


def accelerator() -> Any:
    """What torch.cuda is for cuda."""
    return getattr(torch, used["type"])


def settle() -> None:
    """All ranks come here, and what they have given their devices is done."""
    synchronize()
    fogdist.barrier()


def synchronize() -> None:
    """Waits for all streams of this rank's device."""
    accelerator().synchronize()


@contextlib.contextmanager
def window_of(tensor: torch.Tensor, transport: str, **options: Any) -> Iterator[fogdist.Window]:
    with fogdist.Window(tensor, **options) as window:
        assert window.transport == transport
        yield window
        settle()


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return list(flat.view(torch.uint8).tolist()) if flat.numel() else []


# --- the same numbers as on the CPU -------------------------------------------------------------------------


def random_tensor(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(
            numel, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64
        ).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def script(device: str, dtype_name: str, numel: int) -> list[Any]:
    """One of each operation, with weights that round, in an order that all ranks keep; all that can be seen of it."""
    dtype = getattr(torch, dtype_name)
    rank, size = fogdist.rank(), fogdist.size()
    x = random_tensor(dtype, numel, rank).to(device)
    other = random_tensor(dtype, 2 * numel + 2, 10 + rank).to(device)[1 : 2 * numel + 1 : 2]  # not contiguous
    seen: list[Any] = []
    window = fogdist.Window(x, zero_init=size > 2)

    def step(*what: Any) -> None:
        if device != "cpu":
            synchronize()
        fogdist.barrier()
        seen.append([bits(x), [window.version(peer) for peer in window.in_neighbors], window.p, *what])
        fogdist.barrier()

    step()
    window.put(x)
    step()
    window.put(x, dst_weights={peer: 0.3 + peer for peer in window.out_neighbors}, with_p=True)
    step()
    step(bits(window.update(clone=True)))
    window.accumulate(
        other, self_weight=1 / 3, dst_weights=dict.fromkeys(window.out_neighbors, 0.7), with_p=True
    )
    step(bits(other))
    step(bits(window.update(with_p=True)))
    window.get(src_weights={peer: -1.5 * peer for peer in window.in_neighbors})
    step()
    step(
        bits(
            window.update(
                self_weight=0.25,
                neighbor_weights=dict.fromkeys(window.in_neighbors, 0.6),
                reset=True,
                with_p=True,
            )
        )
    )
    window.accumulate(x, self_weight=0.5, with_p=True)
    window.accumulate(x, dst_weights=dict.fromkeys(window.out_neighbors, 2.0))
    step()
    step(bits(window.collect(with_p=True)))
    window.get()
    step()
    step(
        bits(
            window.update(
                self_weight=0.0, neighbor_weights=dict.fromkeys(window.in_neighbors, 1.0), clone=True
            )
        )
    )
    window.put(x, dst_weights=dict.fromkeys(window.out_neighbors, 0.0), self_weight=0.0)
    step()
    step(bits(window.update(self_weight=1.0, neighbor_weights=dict.fromkeys(window.in_neighbors, 1.0))))
    window.p = 3.5
    step()
    window.free()
    return seen


def same_as_on_the_cpu(transport: str, dtype: str, numel: int) -> None:
    device = start(transport)
    steps = zip(script(device, dtype, numel), script("cpu", dtype, numel), strict=True)
    for number, (on_device, on_cpu) in enumerate(steps):
        for what, here, there in zip(("tensor", "versions", "p", "result"), on_device, on_cpu, strict=False):
            assert here == there, f"step {number}: {what}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bits_are_those_of_the_cpu(worlds, transport, dtype):
    worlds(3).run(same_as_on_the_cpu, transport, dtype, 1003)


@pytest.mark.parametrize("numel", [0, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_few_elements(worlds, transport, numel):
    worlds(2).run(same_as_on_the_cpu, transport, "float32", numel)


# --- nothing is torn ----------------------------------------------------------------------------------------


def race(transport: str, kind: str, mutex: bool, seconds: float) -> list[int]:
    """Rank 0 writes as fast as it can, or changes what is got from it; the others look for mixed values.

    A value has the same number in every element, so a mixture of two shows; and p is that number as well.
    """
    device = start(transport, one_way)
    rank = fogdist.rank()
    x = torch.ones(16 * KIB, dtype=torch.int64, device=device)
    values = [torch.full_like(x, value) for value in range(1, 6)]
    looks, seen = 0, set()
    with window_of(x, transport, zero_init=True) as window:
        settle()
        flags = [torch.zeros(1) for _ in range(1, fogdist.size())]
        ends = [dist.irecv(flag, src=1 + other) for other, flag in enumerate(flags)] if rank == 0 else []
        end = time.monotonic() + seconds
        limit = end + 20.0  # on a busy machine
        while time.monotonic() < limit:
            if time.monotonic() > end and (
                all(e.is_completed() for e in ends) if rank == 0 else min(len(seen), looks) > 1
            ):
                break
            if rank != 0:
                if kind == "get":
                    window.get(require_mutex=mutex)
                found = window.update(
                    self_weight=0.0,
                    neighbor_weights={0: 1.0},
                    reset=kind != "get" and looks % 3 == 0,
                    clone=True,
                    require_mutex=mutex,
                    with_p=True,
                ).cpu()
                low, high = (int(value) for value in torch.aminmax(found))
                assert low == high, f"torn after {looks} looks: {low} and {high}"
                if kind != "get":
                    assert window.p == low
                seen.add(low)
                looks += 1
                continue
            for number, value in enumerate(values, 1):
                window.p = float(number)
                if kind == "put":
                    window.put(value, require_mutex=mutex, with_p=True)
                elif kind == "accumulate":
                    window.accumulate(value, require_mutex=mutex, with_p=True)
                elif mutex:
                    with window.lock():
                        x.mul_(3)  # the owner's own arithmetic
                elif number % 2:
                    window.update(self_weight=3.0, neighbor_weights={})
                else:
                    window.put(x, dst_weights={}, self_weight=3.0)
            synchronize()
        if rank != 0:
            dist.send(torch.ones(1), dst=0)
        for each in ends:
            each.wait()
    return [looks, len(seen)]


@pytest.mark.parametrize("mutex", [False, True], ids=["free", "mutex"])
@pytest.mark.parametrize("kind", ["put", "accumulate", "get"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_is_torn(worlds, transport, kind, mutex):
    _, *readers = worlds(3).run(race, transport, kind, mutex, RACE_SECONDS)
    assert all(looks > 1 and seen > 1 for looks, seen in readers), f"too little was seen: {readers}"


# --- nothing is lost ----------------------------------------------------------------------------------------


def tokens(transport: str, dtype_name: str, numel: int, seconds: float) -> list[float]:
    """Ranks pass on some of what they have, whole pieces only, and collect, at random times."""
    device = start(transport)
    rank, size = fogdist.rank(), fogdist.size()
    dtype = getattr(torch, dtype_name)
    chance = random.Random(rank)
    torch.manual_seed(rank)
    x = torch.full((numel,), 60 // size, dtype=dtype, device=device)
    passed = collected = 0
    fogdist.turn_on_win_ops_with_associated_p()
    fogdist.win_create(x, "w", zero_init=True)
    end = time.monotonic() + seconds
    limit = end + 20.0  # on a busy machine
    while time.monotonic() < (end if min(passed, collected) > 1 else limit):
        other = chance.choice(fogdist.out_neighbor_ranks())
        part = (torch.rand(numel).to(device) * (x.to(torch.float32) + 1)).floor().to(dtype)
        x -= part
        write = (part, "w", 0.0, {other: 1.0}, chance.random() < 0.3)  # and all of p
        if chance.random() < 0.5:
            fogdist.win_accumulate(*write)
        else:
            fogdist.win_wait(fogdist.win_accumulate_nonblocking(*write))
        assert not part.any().item(), "nothing of it was to be kept"
        assert fogdist.win_associated_p("w") == 0.0
        passed += 1
        if chance.random() < 0.6:
            fogdist.win_update_then_collect("w", require_mutex=chance.random() < 0.3)
            collected += 1
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
    settle()
    fogdist.win_update_then_collect("w")
    p = torch.tensor([fogdist.win_associated_p("w")], dtype=torch.float64)
    fogdist.turn_off_win_ops_with_associated_p()
    total = x.cpu().to(torch.int64)
    dist.all_reduce(total)
    dist.all_reduce(p)
    settle()
    fogdist.win_free()
    return [total.min().item(), total.max().item(), p.item(), passed, collected]


@pytest.mark.parametrize(
    ("dtype", "numel"), [("float64", 1), ("float32", 20_000), ("bfloat16", 20_000), ("int64", 500)]
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mass_is_conserved(worlds, transport, dtype, numel):
    results = worlds(3).run(tokens, transport, dtype, numel, RACE_SECONDS)
    for least, most, p, passed, collected in results:
        assert (least, most, p) == (60, 60, 3)
        assert min(passed, collected) > 1


def test_between_hosts(tmp_path):
    """Two ranks on one host and one on another: all are staged."""
    calls = [
        ("same_as_on_the_cpu", ["staged", "bfloat16", 1003]),
        ("tokens", ["staged", "float32", 20_000, 2 * RACE_SECONDS]),
        ("race", ["staged", "put", False, RACE_SECONDS]),
        ("race", ["staged", "get", True, RACE_SECONDS]),
        ("raw_writes", ["staged"]),
    ]
    results = run_on_hosts(tmp_path, [0, 0, 1], "test_device_windows", calls)
    for _, (least, most, p, passed, collected), *_ in results:
        assert (least, most, p) == (60, 60, 3)
        assert min(passed, collected) > 1


# --- streams ------------------------------------------------------------------------------------------------


def a_held_stream(transport: str, kind: str) -> None:
    """What a rank sends is what its stream makes of the tensor by then; nobody sees it before, and no host waits."""
    device = start(transport, one_way)
    rank = fogdist.rank()
    x = torch.full((5000,), 1.0, device=device)
    amount = torch.full_like(x, 2.0)
    with window_of(x, transport, zero_init=True) as window:
        settle()
        stream = torch.Stream(device=device)
        slot = {"self_weight": 0.0, "neighbor_weights": {0: 1.0}, "clone": True}
        if rank == 0:
            write = window.put_nonblocking if kind == "put" else window.accumulate_nonblocking
            with held(stream):
                with stream:
                    torch.Event(device=DEVICE).record(stream)  # it has something to do
                    handle = write(amount)
                amount.fill_(7.0)  # before the stream comes to it
                assert not fogdist.poll(handle)
                fogdist.barrier()
                fogdist.barrier()  # the others have looked
                assert not fogdist.poll(handle)
            with stream:
                fogdist.wait(handle)
            stream.synchronize()
            fogdist.barrier()
        else:
            fogdist.barrier()
            assert window.update(**slot).cpu().eq(0).all(), "seen before the stream came to it"
            fogdist.barrier()
            fogdist.barrier()
            assert window.update(**slot).cpu().eq(7).all()


@pytest.mark.parametrize("kind", ["put", "accumulate"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_held_stream_sends_is_not_seen_before(worlds, transport, kind):
    worlds(3).run(a_held_stream, transport, kind)


def a_blocked_stream() -> None:
    """block_current_stream() of torch's Works orders as wait() does."""
    device = start("peer memory")
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.zeros(8, device=device)
    others = [other for other in range(size) if other != rank]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(x, "blocked", others, others, zero_init=True)
    stream, follower = torch.Stream(device=device), torch.Stream(device=device)
    after, written = torch.Event(device=DEVICE), torch.ones(8, device=device)
    with held(stream):
        with stream:
            torch.Event(device=DEVICE).record(stream)  # it has something to do
            work = window.write(written, others[0], 0)
        with follower:
            work.block_current_stream()
            after.record(follower)
        assert not after.query()
    after.synchronize()
    assert work.is_completed()
    settle()
    window.free()


def test_a_stream_that_a_work_blocks_waits_for_it(worlds):
    worlds(2).run(a_blocked_stream)


def traced() -> None:
    """What an operation gives to the device is within its range in a trace."""
    device = start("peer memory")
    x = torch.zeros(4, 3, device=device)
    with window_of(x, "peer memory") as window:
        other = torch.ones(3, 4, device=device).t()  # to be copied first
        with torch.profiler.profile() as profile:
            window.put(other)
            window.update(clone=True)
        events = profile.events()
        for name, inside in (("fog:win_put", "aten::clone"), ("fog:win_update", "aten::empty")):
            (ours,) = [event.time_range for event in events if event.name == name]
            starts = [event.time_range.start for event in events if event.name == inside]
            assert any(ours.start <= moment <= ours.end for moment in starts), (name, ours, starts)


def test_what_is_launched_is_in_the_operation_s_range(worlds):
    worlds(2).run(traced)


def a_busy_target(transport: str) -> None:
    """Rank 1's stream stands still and its host calls nothing, while rank 0 puts, accumulates and gets."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.full((5000,), 1.0 + rank, device=device)
    amount = torch.full_like(x, 5.0)
    with window_of(x, transport) as window:
        settle()
        if rank == 1:
            with held(torch.accelerator.current_stream()):
                torch.Event(device=DEVICE).record()
                fogdist.barrier()
                fogdist.barrier()
        else:
            fogdist.barrier()
            for mutex in (False, True):
                window.put(amount, require_mutex=mutex)
                window.accumulate(amount, require_mutex=mutex)
                window.get(require_mutex=mutex)
            assert window.update(self_weight=0.0, neighbor_weights={1: 1.0}, clone=True).cpu().eq(2).all()
            synchronize()
            fogdist.barrier()
        if rank == 1:
            assert window.update(self_weight=0.0, neighbor_weights={0: 1.0}, clone=True).cpu().eq(10).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_target_takes_no_part(worlds, transport):
    worlds(2).run(a_busy_target, transport)


def p_behind_a_held_stream(transport: str) -> None:
    """p comes after what the stream has, which here goes on only if another thread of the program can run meanwhile."""
    device = start(transport)
    x = torch.ones(10, device=device)
    stream = torch.accelerator.current_stream()
    with window_of(x, transport, timeout=timedelta(seconds=10)) as window:
        settle()
        extension = device_double.load()
        extension.hold(stream.device_index, stream.stream_id)
        torch.Event(device=DEVICE).record()
        release = threading.Timer(0.05, extension.release, (stream.device_index, stream.stream_id))
        release.start()
        assert window.p == 1.0
        release.join()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_p_lets_other_threads_run(worlds, transport):
    worlds(2).run(p_behind_a_held_stream, transport)


def callbacks_of_a_get(transport: str) -> None:
    """What a callback of a Future gives the device comes after the operation."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.full((1000,), 1.0 + rank, device=device)
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(x, "callbacks", [1 - rank], [1 - rank])
    assert window.transport == transport
    settle()
    given = torch.Event(device=DEVICE)
    stream = torch.accelerator.current_stream()
    for start_operation in (
        lambda: window.get([(1 - rank, 1.0)]),
        lambda: window.signal(1 - rank),
        lambda: window.put(x, [(1 - rank, 1.0)]),
    ):
        with held(stream):
            torch.Event(device=DEVICE).record(stream)
            done = start_operation().get_future().then(lambda future: given.record())
            assert not given.query(), "it does not wait for the operation"
        done.wait()
        given.synchronize()
    settle()
    window.free()


def test_callbacks_come_after_the_operation(worlds):
    worlds(2).run(callbacks_of_a_get, "peer memory")


def all_kernels_are_loaded() -> list[int]:
    device = start("peer memory")
    driver = device_double.load_driver()
    x = torch.ones(1000, dtype=torch.float16, device=device)
    with window_of(x, "peer memory") as window:
        loaded = driver.device_double_calls(b"cuFuncLoad")
        window.accumulate(x, self_weight=0.5, with_p=True)
        window.update(with_p=True)
        window.get()
        settle()
    return [loaded, driver.device_double_calls(b"lazy load")]


def test_kernels_are_loaded_before_any_waits(new_world):
    """CUDA would load a kernel when it is first started, and may wait for all that runs then: for another rank, for ever."""
    assert new_world(2).run(all_kernels_are_loaded) == [[len(_C.kernel_names()), 0]] * 2


def on_the_second_device(transport: str) -> list[bool]:
    """Whether a context was made on each device meanwhile."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.full((1000,), 1.0 + rank, device=device)
    with window_of(x, transport) as window:
        settle()
        extension = device_double.load()
        extension.forget_contexts()
        for _ in range(3):
            handles = [window.put_nonblocking(x, self_weight=0.5), window.accumulate_nonblocking(x)]
            handles.append(window.get_nonblocking())
            for handle in handles:
                fogdist.wait(handle)
            window.update()
            del handles, handle
        settle()
        window.free()
        gc.collect()
        fogdist.barrier()
    return list(extension.contexts())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_other_device_is_touched(worlds, transport):
    """Threads of fog's have device 0 as their own, where nothing is to be made for a window on another one."""
    assert worlds(2).run(on_the_second_device, transport)[1] == [False, True]


# --- mutexes ------------------------------------------------------------------------------------------------


def exclusion(transport: str, enough: float) -> None:
    """Ranks read, change and write back the same slot in their mutex, until they have done so in turns often enough."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.zeros(200, dtype=torch.float64, device=device)
    end = time.monotonic() + 60
    with window_of(x, transport, zero_init=True) as window:
        settle()
        last = 0.0
        while last < enough and time.monotonic() < end:
            if rank == 1:
                with window.mutex([0]):
                    window.get(src_weights=[0])
                    mine = window.update(self_weight=0.0, neighbor_weights={0: 1.0}, clone=True)
                    seen = mine.unique().tolist()
                    window.put(mine + 1, dst_weights=[0])
                assert len(seen) == 1 and seen[0] in (last, last + 1)  # what it wrote, or what that came upon
                last = seen[0]
            else:
                with window.mutex([1], for_self=True):
                    taken = window.update(self_weight=0.0, neighbor_weights={1: 1.0}, clone=True)
                    seen = taken.unique().tolist()
                    x.copy_(taken)  # published at the end of the block
                assert len(seen) == 1 and seen[0] in (last, last + 1)
                last = seen[0]
        settle()
        assert last >= enough


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_mutexes_exclude(worlds, transport):
    worlds(2).run(exclusion, transport, 5.0)


def held_mutex(transport: str) -> None:
    """An operation that needs a mutex which another rank holds fails at its time-out; what was called in the holder's block does not."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.ones(100, device=device)
    with window_of(x, transport, zero_init=True) as window:
        settle()
        if rank == 0:
            with window.lock():
                fogdist.barrier()
                fogdist.barrier()
                window.put(x, require_mutex=True)
        else:
            fogdist.barrier()
            with pytest.raises(
                dist.DistBackendError, match=r"win_mutex .*window 'window 0'.*mutex of owner 0 and rank 1"
            ):
                window.put(x, require_mutex=True, self_weight=0.5, timeout=timedelta(milliseconds=100))
            assert x.cpu().eq(1).all(), "nothing is multiplied if the operation fails"
            fogdist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mutex_that_another_rank_holds(worlds, transport):
    worlds(2).run(held_mutex, transport)


# --- ranks that are stopped or lost -------------------------------------------------------------------------


BIG = 24 * KIB * KIB // 8  # elements: so many take the double's kernels a while


state: dict[str, Any] = {}  # of a rank, from one call to the next


def prepare_to_be_lost(transport: str) -> None:
    device = start(transport)
    numel = BIG
    state["x"] = torch.zeros(numel, dtype=torch.float64, device=device)
    state["window"] = fogdist.Window(state["x"], zero_init=True)
    assert state["window"].transport == transport
    settle()
    if fogdist.rank() == 1:
        state["window"].put(torch.ones_like(state["x"]), dst_weights=[0, 2])
    settle()


def work_until_the_end(what: str, seconds: float) -> None:
    """Rank 1 puts to a neighbor, or updates its own tensor, without end, and then it is gone. The others have nothing to do."""
    if fogdist.rank() == 1:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        values = [torch.full_like(state["x"], value) for value in (2.0, 3.0)]
        while True:
            for value in values:
                if what == "put":
                    state["window"].put(value, dst_weights=[0])
                else:
                    state["window"].update(self_weight=1.0, neighbor_weights={0: 0.0})
                synchronize()


def look_after_a_loss(transport: str) -> float:
    window, x = state["window"], state["x"]
    rank = fogdist.rank()
    while True:  # until it is known
        try:
            window.put(x, dst_weights=[1])
            synchronize()
        except dist.DistBackendError as error:
            assert "win_put" in str(error) and "rank 1" in str(error) and "lost" in str(error), error
            break
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        window.get(src_weights=[1])
    window.put(torch.full_like(x, 4.0 + rank), skip_lost=True)
    taken = window.update(self_weight=0.0, neighbor_weights={1: 1.0}, reset=True, clone=True).cpu()
    low, high = (value.item() for value in torch.aminmax(taken))
    assert low == high, "a rank that dies meanwhile leaves the value that was there"
    synchronize()
    others = [peer for peer in (0, 2) if peer != rank]
    deadline = time.monotonic() + 20
    while (
        window.update(self_weight=0.0, neighbor_weights={others[0]: 1.0}, clone=True).cpu()[0].item()
        != 4.0 + others[0]
    ):
        assert time.monotonic() < deadline
    window.free()
    return float(low)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["put", "update"])
def test_a_lost_rank(new_world, transport, what):
    world = new_world(3)
    world.run(prepare_to_be_lost, transport)
    _, lost, _ = world.run_raw(work_until_the_end, what, 0.1)
    assert lost.state == "died"
    outcomes = {outcome.rank: outcome for outcome in world.run_raw(look_after_a_loss, transport)}
    assert all(outcomes[rank].state == "returned" for rank in (0, 2)), "\n".join(map(str, outcomes.values()))
    assert outcomes[2].value == 1.0
    assert outcomes[0].value in (1.0, 2.0, 3.0)


def free_while_a_neighbor_dies(transport: str) -> None:
    """Rank 0 is in free() when rank 1, for which it waits there, is lost."""
    device = start(transport)
    window = fogdist.Window(torch.zeros(100, device=device))
    assert window.transport == transport
    settle()
    if fogdist.rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    window.free()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_neighbor_is_lost_during_free(new_world, transport):
    outcomes = new_world(2).run_raw(free_while_a_neighbor_dies, transport)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


def signals_of_a_lost_rank(transport: str) -> None:
    """Rank 1 gives one signal and dies: a wait for that one ends well, the next one ends with the loss, long before its time-out."""
    device = start(transport)
    rank = fogdist.rank()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(torch.zeros(8, device=device), "lost", [1 - rank], [1 - rank])
    assert window.transport == transport
    settle()
    if rank == 1:
        window.signal(0).wait()
        synchronize()
        fogdist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    fogdist.barrier()
    waits = [window.wait_signal(1, timeout=timedelta(minutes=10)) for _ in range(2)]
    deadline = time.monotonic() + 30
    while not all(wait.is_completed() for wait in waits):
        assert time.monotonic() < deadline, "a wait goes on for what cannot come any more"
    waits[0].wait()
    with pytest.raises(dist.DistBackendError, match=r"wait_signal .*'lost'.*rank 1 .*lost"):
        waits[1].wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_signals_of_a_lost_rank(new_world, transport):
    outcomes = new_world(2).run_raw(signals_of_a_lost_rank, transport)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


def a_wait_beside_the_pool() -> None:
    """A signal that has come is taken while every stream of torch's pool stands still: the window waits on one of its own."""
    device = torch.device(start("peer memory"))
    rank = fogdist.rank()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(torch.zeros(8, device=device), "apart", [1 - rank], [1 - rank])
    assert window.transport == "peer memory"
    window.signal(1 - rank).wait()
    settle()
    extension = device_double.load()
    pool = range(1, 33)
    for stream in pool:
        extension.hold(device.index, stream)
    try:
        taken = window.wait_signal(1 - rank)
        deadline = time.monotonic() + 20
        while not taken.is_completed():
            assert time.monotonic() < deadline, "it waits on a stream that others may have as well"
    finally:
        for stream in pool:
            extension.release(device.index, stream)
    settle()
    window.free()


def test_signals_have_a_stream_of_their_own(worlds):
    worlds(2).run(a_wait_beside_the_pool)


def stop_and_go(transport: str) -> int:
    """Rank 1 is stopped while it writes; an update of rank 0 that meets its lock ends at the time-out, and later ones are well.

    Returns:
        How often an update failed.
    """
    device = start(transport)
    rank = fogdist.rank()
    x = torch.zeros(BIG // 4, dtype=torch.float64, device=device)
    values = [torch.full_like(x, value) for value in (1.0, 2.0)]
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(parts, torch.tensor([os.getpid()]))
    failed = 0
    with window_of(x, transport, zero_init=True) as window:
        settle()
        done = torch.zeros(1)
        if rank == 1:
            asked = dist.irecv(done, src=0)
            while not asked.is_completed():
                for value in values:
                    window.put(value)
                    synchronize()
        else:
            for _ in range(50):
                os.kill(int(parts[1]), signal.SIGSTOP)
                try:
                    taken = window.update(
                        self_weight=0.0,
                        neighbor_weights={1: 1.0},
                        clone=True,
                        timeout=timedelta(milliseconds=50),
                    )
                    synchronize()
                    version = window.version(1)  # raises what the update has failed with
                    low, high = (value.item() for value in torch.aminmax(taken.cpu()))
                    assert low == high and version == 0
                except dist.DistBackendError as error:
                    failed += 1
                    assert "win_update" in str(error) and "timed out waiting for" in str(error), error
                finally:
                    os.kill(int(parts[1]), signal.SIGCONT)
                time.sleep(random.random() * 0.01)
            dist.send(done, dst=1)
        settle()
        assert window.update(self_weight=0.0, neighbor_weights={1 - rank: 1.0}, clone=True).cpu()[
            0
        ].item() in (0, 2)
    return failed


def test_a_stopped_rank_that_holds_a_lock(worlds):
    failed, _ = worlds(2).run(stop_and_go, "peer memory")
    assert failed > 0, "rank 1 was never stopped while it had the lock"


# --- order --------------------------------------------------------------------------------------------------


def many_in_flight(transport: str, count: int) -> None:
    """Nonblocking operations are done in the order of their calls, each with what its tensor was by then."""
    device = start(transport, one_way)
    rank = fogdist.rank()
    x = torch.zeros(3000, dtype=torch.float64, device=device)
    with window_of(x, transport, zero_init=True) as window:
        settle()
        if rank == 0:
            stream = torch.Stream(device=device)
            numbers = [torch.full_like(x, 1.0 + number) for number in range(count)]
            with held(stream), stream:
                torch.Event(device=DEVICE).record(stream)
                handles = [window.put_nonblocking(numbers[0], self_weight=0.5)]
                handles += [window.accumulate_nonblocking(number) for number in numbers[1:]]
                assert not any(map(fogdist.poll, handles))
            with stream:
                for handle in handles:
                    fogdist.wait(handle)
            stream.synchronize()
            assert numbers[0].cpu().eq(0.5).all() and numbers[1].cpu().eq(2.0).all()
            window.put_nonblocking(numbers[1])
            last = window.accumulate_nonblocking(x, dst_weights={1: 3.0})
            fogdist.wait(last)
        settle()
        if rank != 0:
            assert window.version(0) == 2
            assert window.update(self_weight=0.0, neighbor_weights={0: 1.0}).cpu().eq(2.0).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_operations_in_flight_keep_their_order(worlds, transport):
    worlds(3).run(many_in_flight, transport, 20)


def published(transport: str) -> None:
    """What a neighbor gets: the tensor, or what of it was published last."""
    device = start(transport)
    rank = fogdist.rank()
    x = torch.full((10,), 1.0, device=device)
    with window_of(x, transport, zero_init=True) as window:

        def got() -> float:
            settle()
            window.get()
            value = window.update(self_weight=0.0, neighbor_weights={1 - rank: 1.0}, clone=True)
            settle()
            return float(value.cpu()[0].item())

        assert got() == 1.0
        with window.lock():
            x.fill_(2.0)
        assert got() == 2.0
        window.update(self_weight=2.0, neighbor_weights={})
        assert got() == 4.0
        window.put(x, self_weight=0.5)
        assert got() == 2.0
        x.fill_(7.0)
        assert got() == (7.0 if transport == "peer memory" else 2.0)
        with window.mutex(for_self=True):
            pass
        assert got() == 7.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_neighbors_get(worlds, transport):
    worlds(2).run(published, transport)


# --- torch's own windows ------------------------------------------------------------------------------------


def raw_writes(transport: str) -> None:
    """write() goes into the other rank's tensor itself, and is there when its signal is."""
    device = start(transport)
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.zeros(8, device=device)
    others = [other for other in range(size) if other != rank]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(x, "raw", others, others, zero_init=True)
    assert window.transport == transport
    mine = torch.tensor([rank + 1.0, rank + 1.5], device=device)
    for other in others:
        window.write(mine, other, 2 * rank).wait()
        window.signal(other).wait()
    for other in others:
        window.wait_signal(other).wait()
        torch.accelerator.current_stream().synchronize()
        assert x[2 * other : 2 * other + 2].cpu().tolist() == [other + 1.0, other + 1.5]
        mapped = window.map_remote(other)
        assert (mapped is None) == (transport == "staged")
        if mapped is not None:
            assert mapped.device == x.device and mapped.shape == x.shape
            del mapped
    with pytest.raises(ValueError, match=r"put: tensor: got float32\[2\] for element 7"):
        window.write(mine, others[0], 7)
    late = window.wait_signal(others[0], timeout=timedelta(milliseconds=50))
    deadline = time.monotonic() + 20
    while not late.is_completed():
        assert time.monotonic() < deadline
    with pytest.raises(dist.DistBackendError, match=rf"wait_signal .*a signal of rank {others[0]}"):
        late.wait()
    settle()
    window.free()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_raw_writes_and_signals(worlds, transport):
    worlds(3).run(raw_writes, transport)


# --- arguments ----------------------------------------------------------------------------------------------


def bad_arguments(transport: str) -> None:
    device = start(transport)
    rank = fogdist.rank()
    x = torch.ones(4, device=device)
    with window_of(x, transport) as window:
        assert f"4,) torch.float32 on {device}, {transport}, open" in repr(window)
        with pytest.raises(
            ValueError, match=rf"win_put: tensor: got a tensor on cpu; allowed are tensors on {device}"
        ):
            window.put(torch.ones(4))
        with pytest.raises(
            ValueError, match=r"win_accumulate: tensor: got float32\[5\]; allowed is float32\[4\]"
        ):
            window.accumulate(torch.ones(5, device=device))
        with pytest.raises(ValueError, match="dst_weights"):
            window.put(x, dst_weights={rank: 1.0})
        with pytest.raises(ValueError, match="must be a finite|finite"):
            window.put(x, self_weight=float("nan"))
        with pytest.raises(ValueError, match="expanded"):
            window.put(torch.ones(1, device=device).expand(4), self_weight=0.5)
        with pytest.raises(ValueError, match="in-neighbors"):
            window.version(rank)
        kept = x.data
        x.data = torch.zeros(4, device=device)
        with pytest.raises(ValueError, match="has other memory than when the window was made"):
            window.update()
        x.data = kept
        settle()
        assert window.update(clone=True).cpu().eq(1).all()
    with pytest.raises(RuntimeError, match="was freed"):
        window.put(x)
    with pytest.raises(ValueError, match="not contiguous"):
        fogdist.Window(torch.ones(4, 4, device=device).t(), name="t")
    with pytest.raises(ValueError, match=r"ranks disagree on the tensor .* has float32\[4\] on \w+"):
        fogdist.Window(torch.ones(4, device="cpu" if rank == 1 else device), name="mixed")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bad_arguments(worlds, transport):
    worlds(2).run(bad_arguments, transport)


def one_that_cannot(function: str) -> str:
    """On rank 1 only, a function of the driver fails."""
    device = start("peer memory")
    driver = device_double.load_driver()
    if fogdist.rank() == 1:
        driver.device_double_fail(function.encode(), NOT_SUPPORTED)
    try:
        x = torch.full((100,), 1.0 + fogdist.rank(), device=device)
        with fogdist.Window(x) as window:
            window.put(x)
            settle()
            assert window.update(
                self_weight=0.0, neighbor_weights=dict.fromkeys(window.in_neighbors, 1.0)
            ).cpu()[0] == (6.0 - 1.0 - fogdist.rank())
            settle()
            return window.transport
    finally:
        driver.device_double_fail(function.encode(), 0)


@pytest.mark.parametrize(
    ("function", "transport"),
    [
        ("cuIpcOpenMemHandle_v2", "staged"),
        ("cuIpcGetMemHandle", "staged"),
        ("cuMemAlloc_v2", "staged"),
        ("cuMemHostRegister_v2", "peer memory"),
    ],
)
def test_all_ranks_choose_alike(worlds, function, transport):
    assert worlds(3).run(one_that_cannot, function) == [transport] * 3


def without_locked_pages() -> None:
    start("staged")
    driver = device_double.load_driver()
    driver.device_double_fail(b"cuMemHostRegister_v2", NOT_SUPPORTED)
    try:
        x = torch.full((100,), 1.0 + fogdist.rank(), device=f"{DEVICE}:0")
        with window_of(x, "staged") as window:
            window.put(x)
            fogdist.barrier()
            assert window.update().cpu().eq(1.5).all()
    finally:
        driver.device_double_fail(b"cuMemHostRegister_v2", 0)


def test_staged_without_page_locked_memory(worlds):
    worlds(2).run(without_locked_pages)


# --- the end ------------------------------------------------------------------------------------------------


def all_is_given_back(transport: str) -> list[int]:
    """What the driver holds before a window, while it is open, and after it was freed and its tensor dropped."""
    device = start(transport)
    driver = device_double.load_driver()
    synchronize()
    gc.collect()
    held_by_driver = [driver.device_double_held()]
    x = torch.full((1000,), 1.0 + fogdist.rank(), device=device)
    window = fogdist.Window(x)
    for _ in range(3):
        window.put(x)
        window.update()
    settle()
    held_by_driver.append(driver.device_double_held())
    window.free()
    before = x.cpu()
    assert window.tensor is x and x.cpu().eq(before).all()  # it stays
    x.add_(1.0)
    assert x.cpu().eq(before + 1).all()
    fogdist.barrier()
    del window, x
    gc.collect()
    deadline = time.monotonic() + 20
    while driver.device_double_held() != held_by_driver[0] and time.monotonic() < deadline:
        time.sleep(0.01)  # another thread gives it back
    held_by_driver.append(driver.device_double_held())
    return held_by_driver


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everything_is_given_back(new_world, transport, no_shared_memory_left):
    world = new_world(2, finalizing=None)
    for before, meanwhile, after in world.run(all_is_given_back, transport):
        assert before == after < meanwhile
    world.close()


def dropped_while_busy() -> None:
    """The last tensor of a freed window is dropped while the device has something to do that needs this thread: giving memory back waits
    for it, and whoever drops the tensor does not."""
    device = torch.device(start("peer memory"))
    driver = device_double.load_driver()
    settle()
    gc.collect()
    before = driver.device_double_held()
    x = torch.ones(1000, device=device)
    window = fogdist.Window(x)
    assert window.transport == "peer memory"
    window.put(x)
    settle()
    window.free()
    extension = device_double.load()
    current = torch.accelerator.current_stream()
    pool = range(1, 33)  # the window's stream is one of them
    for stream in pool:
        extension.hold(device.index, stream)
        torch.Event(device=DEVICE).record(
            torch.Stream(stream_id=stream, device_index=device.index, device_type=current.device_type)
        )
    del window, x
    gc.collect()
    for stream in pool:
        extension.release(device.index, stream)
    deadline = time.monotonic() + 20
    while driver.device_double_held() != before:
        assert time.monotonic() < deadline, "it was not given back"
        time.sleep(0.01)


def test_nobody_waits_to_drop_a_tensor(new_world):
    new_world(2).run(dropped_while_busy)


def drop_in_disorder(transport: str) -> None:
    """Puts are in flight when one window is abandoned, one freed and one left to the end of the group."""
    device = start(transport)
    x = torch.full((50_000,), 1.0, device=device)
    windows = [fogdist.Window(x.clone(), name=f"w{number}") for number in range(3)]
    for window in windows:
        for _ in range(3):
            window.put_nonblocking(x)
            window.accumulate_nonblocking(x, self_weight=1.0)
    settle()
    with contextlib.suppress(ZeroDivisionError), windows[0]:
        windows[0].put_nonblocking(x)
        raise ZeroDivisionError
    assert "ZeroDivisionError" in repr(windows[0])
    windows[1].free()
    windows[2].put_nonblocking(x)
    fogdist.shutdown()
    with pytest.raises(RuntimeError):
        windows[2].put(x)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ends_in_disorder(new_world, transport, no_shared_memory_left):
    world = new_world(2, finalizing=None)
    world.run(drop_in_disorder, transport)
    world.close()
