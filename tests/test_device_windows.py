"""Checks for windows of device tensors what test_window_guarantees.py checks for CPU tensors, on the fake device.

Each promise is one function that the ranks of a world run. tests/gpu runs some of these functions on GPUs.
"""

from __future__ import annotations

import contextlib
import gc
import os
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
import test_window_guarantees as guarantees
import torch
import torch.distributed as dist
from device_double import DEVICE, held
from fogdist import topology as topologies
from fogdist.compression import Int8
from harness import on_ranks
from hosts import run_on_hosts
from window_interfaces import one_way


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_double: None) -> None:
    """Compiles the fake CUDA runtime too, because ranks would take too long to compile it."""
    device_double.compile_runtime()


KIB = 1 << 10
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
DTYPES = [*FLOATS, "int8", "int32", "int64", "uint8"]
NOT_SUPPORTED = 801  # cudaErrorNotSupported


def start(topology: Callable[[int], nx.DiGraph] = topologies.FullyConnectedGraph) -> str:
    """Begins a test on a rank: initializes fogdist, and selects and returns a device."""
    if used["type"] == DEVICE:
        device_double.load()
        device_double.load_runtime()
    fogdist.init(topology)
    device = (
        f"{used['type']}:{int(os.environ.get('LOCAL_RANK', fogdist.rank())) % accelerator().device_count()}"
    )
    accelerator().set_device(device)
    return device


used = {"type": DEVICE}  # the type of device that the ranks use


def accelerator() -> Any:
    """Returns the module for the type of device, such as torch.cuda."""
    return getattr(torch, used["type"])


def settle() -> None:
    """Waits until all ranks are here and their devices have finished all work."""
    synchronize()
    fogdist.barrier()


def synchronize() -> None:
    """Waits for all streams of this rank's device."""
    accelerator().synchronize()


@contextlib.contextmanager
def window_of(tensor: torch.Tensor, **options: Any) -> Iterator[fogdist.Window]:
    with fogdist.Window(tensor, **options) as window:
        assert window.transport == "staged"
        yield window
        settle()


def bits(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return list(flat.view(torch.uint8).tolist()) if flat.numel() else []


# --- the same numbers as on the CPU -------------------------------------------------------------------------


def random_tensor(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def script(device: str, dtype_name: str, numel: int) -> list[Any]:
    """Runs each operation once, with weights that round, in one order on all ranks; returns all visible results."""
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

    def to(weight: float) -> dict[int, float]:
        return dict.fromkeys(window.out_neighbors, weight)

    def of(weight: float) -> dict[int, float]:
        return dict.fromkeys(window.in_neighbors, weight)

    step()
    window.put(x)
    step()
    window.put(x, dst_weights={peer: 0.3 + peer for peer in window.out_neighbors}, with_p=True)
    step()
    step(bits(window.update(clone=True)))
    window.accumulate(other, self_weight=1 / 3, dst_weights=to(0.7), with_p=True)
    step(bits(other))
    step(bits(window.update(with_p=True)))
    window.get(src_weights={peer: -1.5 * peer for peer in window.in_neighbors})
    step()
    step(bits(window.update(self_weight=0.25, neighbor_weights=of(0.6), reset=True, with_p=True)))
    window.accumulate(x, self_weight=0.5, with_p=True)
    window.accumulate(x, dst_weights=to(2.0))
    step()
    step(bits(window.collect(with_p=True)))
    window.get()
    step()
    step(bits(window.update(self_weight=0.0, neighbor_weights=of(1.0), clone=True)))
    window.put(x, dst_weights=to(0.0), self_weight=0.0)
    step()
    step(bits(window.update(self_weight=1.0, neighbor_weights=of(1.0))))
    if dtype.is_floating_point:
        codec = Int8(block=64)
        window.put(x, compression=codec)
        step()
        window.accumulate(other, self_weight=1 / 3, dst_weights=to(1.0), with_p=True, compression=codec)
        step(bits(other))
        step(bits(window.collect(with_p=True)))
    window.p = 3.5
    step()
    window.free()
    return seen


def same_as_on_the_cpu(dtype: str, numel: int) -> None:
    device = start()
    steps = zip(script(device, dtype, numel), script("cpu", dtype, numel), strict=True)
    for number, (on_device, on_cpu) in enumerate(steps):
        for what, here, there in zip(("tensor", "versions", "p", "result"), on_device, on_cpu, strict=False):
            assert here == there, f"step {number}: {what}"


@pytest.mark.parametrize(
    ("dtype", "numel"),
    [("bfloat16", 1003), ("complex128", 1003), ("uint8", 1003), ("float32", 0), ("float32", 1)],
)
def test_bits_are_those_of_the_cpu(worlds, dtype, numel):
    worlds(3).run(same_as_on_the_cpu, dtype, numel)


# --- nothing is torn or lost --------------------------------------------------------------------------------


def race(kind: str, mutex: bool) -> tuple[int, int, float]:
    return guarantees.race("object", 128 * KIB, mutex, kind, start())


def tokens(interface: str, dtype: str, numel: int) -> tuple[float, float, float, int]:
    return guarantees.tokens(interface, dtype, numel, start())


@pytest.mark.parametrize(
    ("kind", "mutex"), [("put", False), ("accumulate", True), ("get", False), ("get", True)]
)
def test_nothing_is_torn(worlds, kind, mutex):
    _, *readers = worlds(3).run(race, kind, mutex)
    assert all(looks > 1 and seen > 1 for looks, seen, _ in readers), f"too little was seen: {readers}"


def test_mass_is_conserved(worlds):
    for case in [("name", "float64", 1), ("object", "bfloat16", 20_000), ("_C", "int64", 500)]:
        for least, most, p, moves in worlds(3).run(tokens, *case):
            assert (least, most, p) == (60, 60, 3) and moves > 1, case


@pytest.mark.parametrize("way", ["tcp", pytest.param("rma", marks=pytest.mark.long)])
def test_between_hosts(tmp_path, way):
    """Two ranks are on one host and one on another."""
    # with RMA, shared memory moves data without the target, also between network namespaces
    environment = {"FOG_BETWEEN_HOSTS": way} | ({"UCX_TLS": "shm,self"} if way == "rma" else {})
    calls = [
        ("same_as_on_the_cpu", ["bfloat16", 1003]),
        ("tokens", ["name", "float32", 20_000]),
        ("race", ["put", False]),
        ("race", ["get", True]),
        ("raw_writes", []),
    ]
    results = run_on_hosts(tmp_path, [0, 0, 1], "test_device_windows", calls, environment=environment)
    for _, (least, most, p, moves), *_ in results:
        assert (least, most, p) == (60, 60, 3) and moves > 1


# --- streams ------------------------------------------------------------------------------------------------


@on_ranks(3, kind=["put", "accumulate"])
def test_what_a_held_stream_sends_is_not_seen_before(kind: str) -> None:
    """A rank sends the value that its stream has computed; no rank sees it earlier, and no host waits."""
    device = start(one_way)
    rank = fogdist.rank()
    x = torch.full((5000,), 1.0, device=device)
    amount = torch.full_like(x, 2.0)
    with window_of(x, zero_init=True) as window:
        settle()
        stream = torch.Stream(device=device)
        slot = {"self_weight": 0.0, "neighbor_weights": {0: 1.0}, "clone": True}
        if rank == 0:
            write = window.put_nonblocking if kind == "put" else window.accumulate_nonblocking
            with held(stream):
                with stream:
                    torch.Event(device=DEVICE).record(stream)  # gives the stream some work
                    handle = write(amount)
                amount.fill_(7.0)  # changes the value before the stream reads it
                assert not fogdist.poll(handle)
                fogdist.barrier()
                fogdist.barrier()  # the others have read their slots
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


@on_ranks(2)
def test_the_target_takes_no_part() -> None:
    """Rank 1's stream is held and its host calls nothing, while rank 0 puts, accumulates and gets."""
    device = start()
    rank = fogdist.rank()
    x = torch.full((5000,), 1.0 + rank, device=device)
    amount = torch.full_like(x, 5.0)
    with window_of(x) as window:
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


@on_ranks(2)
def test_p_lets_other_threads_run() -> None:
    """Reading p waits for the stream. The stream is released by another thread, which must be able to run meanwhile."""
    device = start()
    x = torch.ones(10, device=device)
    stream = torch.accelerator.current_stream()
    with window_of(x, timeout=timedelta(seconds=10)) as window:
        settle()
        extension = device_double.load()
        extension.hold(stream.device_index, stream.stream_id)
        torch.Event(device=DEVICE).record()
        release = threading.Timer(0.05, extension.release, (stream.device_index, stream.stream_id))
        release.start()
        assert window.p == 1.0
        release.join()


def on_the_second_device() -> list[bool]:
    """Returns for each device whether a context was created."""
    device = start()
    rank = fogdist.rank()
    x = torch.full((1000,), 1.0 + rank, device=device)
    with window_of(x) as window:
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


def test_no_other_device_is_touched(worlds):
    """Device 0 is the current device of fog's threads. Nothing may be created there for a window on another device."""
    assert worlds(2).run(on_the_second_device)[1] == [False, True]


# --- mutexes ------------------------------------------------------------------------------------------------


def exclusion(enough: float) -> None:
    """Ranks read, change and write back the same slot under their mutex, until they have alternated often enough."""
    device = start()
    rank = fogdist.rank()
    x = torch.zeros(200, dtype=torch.float64, device=device)
    end = time.monotonic() + 60
    with window_of(x, zero_init=True) as window:
        settle()
        last = 0.0
        while last < enough and time.monotonic() < end:
            if rank == 1:
                with window.mutex([0]):
                    window.get(src_weights=[0])
                    mine = window.update(self_weight=0.0, neighbor_weights={0: 1.0}, clone=True)
                    seen = mine.unique().tolist()
                    window.put(mine + 1, dst_weights=[0])
                # its own last value, or the next one, which the other rank based on it
                assert len(seen) == 1 and seen[0] in (last, last + 1)
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


def test_mutexes_exclude(worlds):
    worlds(2).run(exclusion, 5.0)


def held_mutex() -> None:
    """An operation fails at its timeout if another rank holds the mutex; one in the holder's block succeeds."""
    device = start()
    rank = fogdist.rank()
    x = torch.ones(100, device=device)
    with window_of(x, zero_init=True) as window:
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


def test_a_mutex_that_another_rank_holds(worlds):
    worlds(2).run(held_mutex)


# --- ranks that are stopped or lost -------------------------------------------------------------------------


BIG = 24 * KIB * KIB // 8  # elements; so many that a copy takes a while


state: dict[str, Any] = {}  # of a rank, kept between calls


def prepare_to_be_lost() -> None:
    device = start()
    numel = BIG
    state["x"] = torch.zeros(numel, dtype=torch.float64, device=device)
    state["window"] = fogdist.Window(state["x"], zero_init=True)
    assert state["window"].transport == "staged"
    settle()
    if fogdist.rank() == 1:
        state["window"].put(torch.ones_like(state["x"]), dst_weights=[0, 2])
    settle()


def work_until_the_end(what: str, seconds: float) -> None:
    """Rank 1 puts or updates its own tensor in a loop until it is killed. The other ranks do nothing."""
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


def look_after_a_loss() -> float:
    window, x = state["window"], state["x"]
    rank = fogdist.rank()
    while True:  # until the loss is known
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


@pytest.mark.parametrize("what", ["put", "update"])
def test_a_lost_rank(new_world, what):
    world = new_world(3)
    world.run(prepare_to_be_lost)
    _, lost, _ = world.run_raw(work_until_the_end, what, 0.1)
    assert lost.state == "died"
    outcomes = {outcome.rank: outcome for outcome in world.run_raw(look_after_a_loss)}
    assert all(outcomes[rank].state == "returned" for rank in (0, 2)), "\n".join(map(str, outcomes.values()))
    assert outcomes[2].value == 1.0
    assert outcomes[0].value in (1.0, 2.0, 3.0)


def free_while_a_neighbor_dies() -> None:
    """Rank 0 is in free(), and waits there for rank 1, when rank 1 is lost."""
    device = start()
    window = fogdist.Window(torch.zeros(100, device=device))
    assert window.transport == "staged"
    settle()
    if fogdist.rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(60)
    window.free()


def test_a_neighbor_is_lost_during_free(new_world):
    outcomes = new_world(2).run_raw(free_while_a_neighbor_dies)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


def signals_of_a_lost_rank() -> None:
    """Rank 1 sends one signal and dies: the wait for it succeeds, the next one fails long before its timeout."""
    device = start()
    rank = fogdist.rank()
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(torch.zeros(8, device=device), "lost", [1 - rank], [1 - rank])
    assert window.transport == "staged"
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


def test_signals_of_a_lost_rank(new_world):
    outcomes = new_world(2).run_raw(signals_of_a_lost_rank)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


# --- order --------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_operations_in_flight_keep_their_order() -> None:
    """Nonblocking operations take place in the order of their calls, with the values of their place in the stream."""
    device = start(one_way)
    rank = fogdist.rank()
    x = torch.zeros(3000, dtype=torch.float64, device=device)
    with window_of(x, zero_init=True) as window:
        settle()
        if rank == 0:
            stream = torch.Stream(device=device)
            numbers = [torch.full_like(x, 1.0 + number) for number in range(20)]
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


def published() -> None:
    """A neighbor gets the tensor as it was published last."""
    device = start()
    rank = fogdist.rank()
    x = torch.full((10,), 1.0, device=device)
    with window_of(x, zero_init=True) as window:

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
        assert got() == 2.0
        with window.mutex(for_self=True):
            pass
        assert got() == 7.0


def test_what_neighbors_get(worlds):
    worlds(2).run(published)


# --- torch's own windows ------------------------------------------------------------------------------------


def raw_writes() -> None:
    """write() writes to the other rank's tensor itself, and the data is there when its signal arrives."""
    device = start()
    rank, size = fogdist.rank(), fogdist.size()
    x = torch.zeros(8, device=device)
    others = [other for other in range(size) if other != rank]
    backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
    window = backend.create_window(x, "raw", others, others, zero_init=True)
    assert window.transport == "staged"
    mine = torch.tensor([rank + 1.0, rank + 1.5], device=device)
    for other in others:
        window.write(mine, other, 2 * rank).wait()
        window.signal(other).wait()
    for other in others:
        window.wait_signal(other).wait()
        torch.accelerator.current_stream().synchronize()
        assert x[2 * other : 2 * other + 2].cpu().tolist() == [other + 1.0, other + 1.5]
        assert window.map_remote(other) is None
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


def test_raw_writes_and_signals(worlds):
    worlds(3).run(raw_writes)


# --- arguments ----------------------------------------------------------------------------------------------


def bad_arguments() -> None:
    """What a device adds; test_windows.py has the other arguments."""
    device = start()
    x = torch.ones(4, device=device)
    with window_of(x) as window:
        assert f"4,) torch.float32 on {device}, staged, open" in repr(window)
        message = rf"win_put: tensor: got a tensor on cpu; allowed are tensors on {device}"
        with pytest.raises(ValueError, match=message):
            window.put(torch.ones(4))
        with pytest.raises(
            ValueError, match=r"win_accumulate: tensor: got float32\[5\]; allowed is float32\[4\]"
        ):
            window.accumulate(torch.ones(5, device=device))
        kept = x.data
        x.data = torch.zeros(4, device=device)
        with pytest.raises(ValueError, match="has other memory than when the window was made"):
            window.update()
        x.data = kept
        settle()
        assert window.update(clone=True).cpu().eq(1).all()
    with pytest.raises(ValueError, match="not contiguous"):
        fogdist.Window(torch.ones(4, 4, device=device).t(), name="t")
    with pytest.raises(ValueError, match=r"ranks disagree on the tensor .* has float32\[4\] on \w+"):
        fogdist.Window(torch.ones(4, device="cpu" if fogdist.rank() == 1 else device), name="mixed")


def test_bad_arguments(worlds):
    worlds(2).run(bad_arguments)


@on_ranks(2)
def test_staged_without_page_locked_memory() -> None:
    device = start()
    runtime = device_double.load_runtime()
    runtime.device_double_refuse(NOT_SUPPORTED)
    try:
        x = torch.full((100,), 1.0 + fogdist.rank(), device=device)
        with window_of(x) as window:
            window.put(x)
            fogdist.barrier()
            assert window.update().cpu().eq(1.5).all()
            assert runtime.device_double_locked() == 0
    finally:
        runtime.device_double_refuse(0)
    assert runtime.cudaGetLastError() == 0, "torch would take it for an error of its own"


# --- the end ------------------------------------------------------------------------------------------------


needs_the_runtime_s_double = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch has a runtime of its own, which locks nothing without a GPU",
)


def all_is_given_back() -> list[int]:
    """Returns the size of page-locked memory before a window, while it is open, and after its end."""
    device = start()
    runtime = device_double.load_runtime()
    synchronize()
    gc.collect()
    locked = [runtime.device_double_locked()]
    x = torch.full((1000,), 1.0 + fogdist.rank(), device=device)
    window = fogdist.Window(x)
    for _ in range(3):
        window.put(x)
        window.update()
    settle()
    locked.append(runtime.device_double_locked())
    window.free()
    before = x.cpu()
    assert window.tensor is x and x.cpu().eq(before).all()  # the tensor is unchanged
    x.add_(1.0)
    assert x.cpu().eq(before + 1).all()
    fogdist.barrier()
    del window, x
    gc.collect()
    deadline = time.monotonic() + 20
    while runtime.device_double_locked() != locked[0] and time.monotonic() < deadline:
        time.sleep(0.01)  # the engine's thread may have the last reference
    locked.append(runtime.device_double_locked())
    return locked


@needs_the_runtime_s_double
def test_everything_is_given_back(new_world, no_shared_memory_left):
    world = new_world(2, finalizing=None)
    for before, meanwhile, after in world.run(all_is_given_back):
        assert before == after < meanwhile
    world.close()


def drop_in_disorder() -> None:
    """While puts are in flight, one window is abandoned, one is freed and one is left to the end of the group."""
    device = start()
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


def test_ends_in_disorder(new_world, no_shared_memory_left):
    world = new_world(2, finalizing=None)
    world.run(drop_in_disorder)
    world.close()
