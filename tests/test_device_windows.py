"""Windows of device tensors: what test_windows.py and test_window_guarantees.py promise, and streams of the device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import device_double
import device_worlds
import fogdist
import networkx as nx
import pytest
import test_window_guarantees as guarantees
import test_windows
import torch
import torch.distributed as dist
import window_interfaces
from device_double import held
from device_worlds import DEVICE, ON_GPUS, on_the_double_only, place
from fogdist import topology as topologies
from harness import error_of, on_ranks
from hosts import run_on_hosts
from window_interfaces import INTERFACES, one_way

WORLDS = device_worlds.WindowWorlds
pytestmark = device_worlds.MARKS

NOT_SUPPORTED = 801  # cudaErrorNotSupported
MIB = 1 << 20


def start(topology: Callable[[int], nx.DiGraph] = topologies.fully_connected) -> torch.device:
    """Begins a test on a rank: initializes fogdist, and selects and returns a device, the last one of the double."""
    fogdist.init(topology)
    there = place()
    if not ON_GPUS:
        there = torch.device(DEVICE, fogdist.rank() % 2)
    torch.accelerator.set_device_index(there.index)
    return there


def settle() -> None:
    """Waits until all ranks are here and their devices have finished all work."""
    torch.accelerator.synchronize()
    dist.barrier()


@contextlib.contextmanager
def window_of(tensor: torch.Tensor, **options: Any) -> Iterator[fogdist.Window]:
    with fogdist.Window(tensor, **options) as window:
        assert window.transport == "staged"
        yield window
        settle()


def slot_of(window: fogdist.Window, rank: int) -> torch.Tensor:
    return window.update(self_weight=0.0, neighbor_weights={rank: 1.0}, clone=True).cpu()


# --- what windows on the CPU promise ------------------------------------------------------------------------


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function of another file with windows on the device."""
    window_interfaces.home[0] = start()
    with mock.patch.object(dist, "barrier", guarantees.meet):  # torch's would use the device
        return function(*arguments)


PROMISES = [
    *(test_windows.operations, test_windows.copies_at_first, test_windows.p_goes_with_the_value),
    test_windows.the_share_that_the_sender_keeps,
    *(guarantees.mutex_of_operations, guarantees.many_mutexes),
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_promises_of_windows(worlds, promise):
    interfaces = INTERFACES[:2] if promise is guarantees.mutex_of_operations else INTERFACES
    for interface in interfaces:
        worlds(3).run(on_device, promise, interface)


def test_the_end_of_a_window(worlds):
    for promise, *arguments in [
        (guarantees.free_late, True),
        (guarantees.free_in_different_orders,),
        (guarantees.drop_windows,),
    ]:
        worlds(3).run(on_device, promise, *arguments)


@pytest.mark.parametrize(
    ("kind", "mutex"), [("put", False), ("accumulate", True), ("get", False), ("get", True)]
)
def test_nothing_is_torn(worlds, kind, mutex):
    _, *readers = worlds(3).run(race, kind, mutex)
    assert all(looks > 1 and seen > 1 for looks, seen, _ in readers), f"too little was seen: {readers}"


def race(kind: str, mutex: bool) -> tuple[int, int, float]:
    return guarantees.race("object", MIB // 8, mutex, kind, start())


def tokens(interface: str, dtype: str, numel: int) -> tuple[float, float, float, int]:
    return guarantees.tokens(interface, dtype, numel, start())


def test_mass_is_conserved(worlds):
    for case in [("name", "float64", 1), ("object", "bfloat16", 20_000), ("_C", "int64", 500)]:
        for least, most, p, moves in worlds(3).run(tokens, *case):
            assert (least, most, p) == (60, 60, 3) and moves > 1, case


@on_the_double_only
@pytest.mark.parametrize("way", ["tcp", pytest.param("rma", marks=pytest.mark.long)])
def test_between_hosts(tmp_path, worlds, way):
    """Two ranks are on one host and one on another."""
    # with RMA, shared memory moves data without the target, also between network namespaces
    environment = {"FOG_BETWEEN_HOSTS": way} | ({"UCX_TLS": "shm,self"} if way == "rma" else {})
    calls = [("tokens", ["name", "float32", 20_000]), ("race", ["get", True]), ("raw_writes", [])]
    results = run_on_hosts(tmp_path, [0, 0, 1], "test_device_windows", calls, environment=environment)
    for (least, most, p, moves), *_ in results:
        assert (least, most, p) == (60, 60, 3) and moves > 1


@pytest.mark.parametrize("how", ["free", "shutdown", "exit"])
@pytest.mark.usefixtures("no_shared_memory_left")
def test_the_end_in_any_order(new_world, worlds, how):
    world = new_world(3, finalizing=None)
    world.run(on_device, guarantees.end_in_any_order, "object", how)
    world.close()


@pytest.mark.usefixtures("no_shared_memory_left")
def test_a_lost_neighbor(new_world, worlds):
    outcomes = new_world(3).run_raw(on_device, guarantees.lose_a_neighbor, "object", "put")
    assert [each.state for each in outcomes] == ["returned", "returned", "died"], [*map(str, outcomes)]


def signals_of_a_lost_rank() -> None:
    """Rank 1 sends one signal and dies: the wait for it succeeds, the next one fails long before its timeout."""
    device, rank = start(), fogdist.rank()
    window = window_interfaces.create(torch.zeros(8, device=device), "lost")
    settle()
    if rank == 1:
        window.signal(0).wait()
        settle()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    waits = [window.wait_signal(1, timeout=timedelta(minutes=10)) for _ in range(2)]
    waits[0].wait()
    with pytest.raises(dist.DistBackendError, match=r"wait_signal .*'lost'.*rank 1 .*lost"):
        waits[1].wait()


def test_signals_of_a_lost_rank(new_world, worlds):
    outcomes = new_world(2).run_raw(signals_of_a_lost_rank, timeout=30.0)
    assert [outcome.state for outcome in outcomes] == ["returned", "died"], "\n".join(map(str, outcomes))


# --- streams ------------------------------------------------------------------------------------------------


@on_the_double_only
@on_ranks(3, kind=["put", "accumulate"])
def test_what_a_held_stream_sends_is_not_seen_before(kind: str) -> None:
    """A rank sends the value that its stream has computed; no rank sees it earlier, and no host waits."""
    device, rank = start(one_way), fogdist.rank()
    x = torch.full((5000,), 1.0, device=device)
    amount = torch.full_like(x, 2.0)
    with window_of(x, zero_init=True) as window:
        settle()
        stream = torch.Stream(device=device)
        if rank == 0:
            write = window.put if kind == "put" else window.accumulate
            with held(stream):
                with stream:
                    torch.Event(device=DEVICE).record(stream)  # gives the stream some work
                    work = write(amount, async_op=True)
                amount.fill_(7.0)  # changes the value before the stream reads it
                assert not work.is_completed()
                dist.barrier()
                dist.barrier()  # the others have read their slots
                assert not work.is_completed()
            with stream:
                work.wait()
            stream.synchronize()
            dist.barrier()
        else:
            dist.barrier()
            assert slot_of(window, 0).eq(0).all(), "seen before the stream came to it"
            dist.barrier()
            dist.barrier()
            assert slot_of(window, 0).eq(7).all()


@on_the_double_only
@on_ranks(2)
def test_the_target_takes_no_part() -> None:
    """Rank 1's stream is held and its host calls nothing, while rank 0 puts, accumulates and gets."""
    device, rank = start(), fogdist.rank()
    x = torch.full((5000,), 1.0 + rank, device=device)
    amount = torch.full_like(x, 5.0)
    with window_of(x) as window:
        settle()
        if rank == 1:
            with held(torch.accelerator.current_stream()):
                torch.Event(device=DEVICE).record()
                dist.barrier()
                dist.barrier()
            assert slot_of(window, 0).eq(10).all()
        else:
            dist.barrier()
            for mutex in (False, True):
                window.put(amount, require_mutex=mutex)
                window.accumulate(amount, require_mutex=mutex)
                window.get(require_mutex=mutex)
            assert slot_of(window, 1).eq(2).all()
            settle()


@on_the_double_only
@on_ranks(2)
def test_p_lets_other_threads_run() -> None:
    """Reading p waits for the stream. The stream is released by another thread, which must be able to run meanwhile."""
    x = torch.ones(10, device=start())
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


@on_the_double_only
@on_ranks(2)
def test_no_other_device_is_touched() -> None:
    """Device 0 is the current device of fog's threads. Nothing may be created there for a window on another device."""
    device, rank = start(), fogdist.rank()
    x = torch.full((1000,), 1.0 + rank, device=device)
    with window_of(x) as window:
        settle()
        extension = device_double.load()
        extension.forget_contexts()
        for _ in range(3):
            works = [window.put(x, self_weight=0.5, async_op=True), window.accumulate(x, async_op=True)]
            works.append(window.get(async_op=True))
            for work in works:
                work.wait()
            window.update()
            del works, work
        settle()
        window.free()
        gc.collect()
        dist.barrier()
    assert rank == 0 or list(extension.contexts()) == [False, True]


@on_the_double_only
@on_ranks(3)
def test_operations_in_flight_keep_their_order() -> None:
    """Nonblocking operations take place in the order of their calls, with the values of their place in the stream."""
    device, rank = start(one_way), fogdist.rank()
    x = torch.zeros(3000, dtype=torch.float64, device=device)
    with window_of(x, zero_init=True) as window:
        settle()
        if rank == 0:
            stream = torch.Stream(device=device)
            numbers = [torch.full_like(x, 1.0 + number) for number in range(20)]
            with held(stream), stream:
                torch.Event(device=DEVICE).record(stream)
                works = [window.put(numbers[0], self_weight=0.5, async_op=True)]
                works += [window.accumulate(number, async_op=True) for number in numbers[1:]]
                assert not any(work.is_completed() for work in works)
            with stream:
                for work in works:
                    work.wait()
            stream.synchronize()
            assert numbers[0].cpu().eq(0.5).all() and numbers[1].cpu().eq(2.0).all()
            with held(stream), stream:  # longer than the operation may take: it fails, and nothing is sent
                torch.Event(device=DEVICE).record(stream)
                late = window.put(numbers[2], timeout=timedelta(milliseconds=50), async_op=True)
                assert f"timed out waiting for {DEVICE}" in error_of(late.wait)
            stream.synchronize()
        settle()
        if rank != 0:
            assert window.version(0) == 1
            assert slot_of(window, 0).eq(sum(range(1, 21))).all()


# --- what a device adds ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_neighbors_get() -> None:
    """A neighbor gets the tensor as it was published last."""
    device, rank = start(), fogdist.rank()
    x = torch.full((10,), 1.0, device=device)
    with window_of(x, zero_init=True) as window:

        def got() -> float:
            settle()
            window.get()
            value = slot_of(window, 1 - rank)[0].item()
            settle()
            return value

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


@on_ranks(2)
def test_strided() -> None:
    """Tensors with strides are sent, and keep the sender's share."""
    device, rank = start(), fogdist.rank()
    wide = torch.linspace(-1, 1, 2000)
    x = [(wide + r)[::2] for r in range(2)]
    with window_of(torch.zeros(1000, device=device), zero_init=True) as window:
        mine = (wide + rank).to(device)[::2]
        window.put(mine)
        window.accumulate(mine, self_weight=0.5)
        torch.testing.assert_close(mine.cpu(), 0.5 * x[rank])
        settle()
        torch.testing.assert_close(slot_of(window, 1 - rank), 2 * x[1 - rank])


def raw_writes() -> None:
    """write() writes to the other rank's tensor itself, and the data is there when its signal arrives."""
    device, rank = start(), fogdist.rank()
    x = torch.zeros(8, device=device)
    others = window_interfaces.others()
    window = window_interfaces.create(x, "raw", zero_init=True)
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
    settle()
    window.free()


def test_raw_writes_and_signals(worlds):
    worlds(3).run(raw_writes)


@on_ranks(2)
def test_more_windows_than_streams_in_the_pool_of_torch() -> None:
    device, rank = start(), fogdist.rank()
    with contextlib.ExitStack() as stack:
        windows = [
            stack.enter_context(window_of(torch.full((5000,), float(rank + number), device=device)))
            for number in range(40)
        ]
        for work in [window.put(window.tensor, async_op=True) for window in windows]:
            work.wait()
        settle()
        for number, window in enumerate(windows):
            assert window.update(clone=True).cpu().eq(number + 0.5).all()


@on_ranks(2)
def test_bad_arguments() -> None:
    """What a device adds; test_windows.py has the other arguments."""
    device = start()
    x = torch.ones(4, device=device)
    with window_of(x) as window:
        assert f"4,) torch.float32 on {device}, staged, open" in repr(window)
        message = rf"Window.put: tensor: got a tensor on cpu; allowed are tensors on {device}"
        with pytest.raises(ValueError, match=message):
            window.put(torch.ones(4))
        kept = x.data
        x.data = torch.zeros(4, device=device)
        with pytest.raises(ValueError, match="has other memory than when the window was made"):
            window.update()
        x.data = kept
        settle()
        assert window.update(clone=True).cpu().eq(1).all()
    with pytest.raises(ValueError, match=r"ranks disagree on the tensor .* has float32\[4\] on \w+"):
        fogdist.Window(torch.ones(4, device="cpu" if fogdist.rank() == 1 else device), name="mixed")


# --- page-locked memory -----------------------------------------------------------------------------------------


needs_the_runtime_s_double = pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="this torch has a runtime of its own, which locks nothing without a GPU",
)


@on_the_double_only
@on_ranks(2)
def test_staged_without_page_locked_memory() -> None:
    device = start()
    runtime = device_double.load_runtime()
    runtime.device_double_refuse(NOT_SUPPORTED)
    try:
        x = torch.full((100,), 1.0 + fogdist.rank(), device=device)
        with window_of(x) as window:
            window.put(x)
            dist.barrier()
            assert window.update().cpu().eq(1.5).all()
            assert runtime.device_double_locked() == 0
    finally:
        runtime.device_double_refuse(0)
    assert runtime.cudaGetLastError() == 0, "torch would take it for an error of its own"


@on_the_double_only
@needs_the_runtime_s_double
@on_ranks(2)
def test_everything_is_given_back() -> None:
    device = start()
    runtime = device_double.load_runtime()
    settle()
    gc.collect()
    before = runtime.device_double_locked()
    x = torch.full((1000,), 1.0 + fogdist.rank(), device=device)
    window = fogdist.Window(x)
    for _ in range(3):
        window.put(x)
        window.update()
    settle()
    assert runtime.device_double_locked() > before
    window.free()
    values = x.cpu()
    x.add_(1.0)
    assert window.tensor is x and x.cpu().eq(values + 1).all()  # it is an ordinary tensor
    dist.barrier()
    del window, x
    gc.collect()
    deadline = time.monotonic() + 20
    while runtime.device_double_locked() != before:  # the engine's thread may have the last reference
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_locked(address: int) -> bool:
    """Returns whether the driver knows an address as host memory."""
    memory_type, of_host = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST
    found, at = ctypes.c_uint(), ctypes.c_ulonglong(address)
    status: int = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(found), memory_type, at)
    return status == 0 and found.value == of_host


@device_worlds.on_gpus_only
@on_ranks(2)
def test_the_runtime_locks_pages() -> None:
    """The window's copy on the host, the first large one in fog's arena, is page-locked."""
    with window_of(torch.zeros(4 * MIB, dtype=torch.uint8, device=start())):
        with open("/proc/self/maps") as maps:  # these include other ranks' arenas
            begins = [int(line.split("-")[0], 16) for line in maps if "fog_arena" in line]
        assert any(is_locked(begin + number * MIB) for begin in begins for number in range(1024))
