"""What windows of device tensors promise, on GPUs: tests/test_device_windows.py without what only its double can do."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import device_double
import device_training
import pytest
import test_device_windows as windows
import torch

from fog_pg import _driver

over_each_transport = pytest.mark.parametrize("transport", windows.TRANSPORTS)

SECONDS = 1.0


def on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    windows.used["type"] = device_training.GPU
    return function(*arguments)


@over_each_transport
@pytest.mark.parametrize("numel", [1, 100_003])
@pytest.mark.parametrize("dtype", windows.DTYPES)
def test_bits_are_those_of_the_cpu(window_worlds, transport, dtype, numel):
    window_worlds(2, transport).run(on_gpu, windows.same_as_on_the_cpu, transport, dtype, numel)


@over_each_transport
@pytest.mark.parametrize("mutex", [False, True], ids=["free", "mutex"])
@pytest.mark.parametrize("kind", ["put", "accumulate", "get"])
def test_nothing_is_torn(window_worlds, transport, kind, mutex):
    _, *readers = window_worlds(3, transport).run(on_gpu, windows.race, transport, kind, mutex, SECONDS)
    assert all(looks > 1 and seen > 1 for looks, seen in readers), f"too little was seen: {readers}"


@over_each_transport
@pytest.mark.parametrize(("dtype", "numel"), [("float64", 1), ("float32", 1_000_000), ("bfloat16", 20_000)])
def test_mass_is_conserved(window_worlds, transport, dtype, numel):
    results = window_worlds(3, transport).run(on_gpu, windows.tokens, transport, dtype, numel, SECONDS)
    for least, most, p, passed, collected in results:
        assert (least, most, p) == (60, 60, 3)
        assert min(passed, collected) > 1


@over_each_transport
def test_mutexes_exclude(window_worlds, transport):
    window_worlds(2, transport).run(on_gpu, windows.exclusion, transport, 30.0)


@over_each_transport
@pytest.mark.parametrize(
    "function",
    [windows.held_mutex, windows.published, windows.raw_writes, windows.bad_arguments],
    ids=lambda function: function.__name__,
)
def test_what_the_double_is_tested_with(window_worlds, transport, function):
    window_worlds(2, transport).run(on_gpu, function, transport)


MIB = 1 << 20
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
OF_HOST = 1  # CU_MEMORYTYPE_HOST


def is_locked(address: int) -> bool:
    """Whether the driver knows an address as one of the host's memory."""
    found = ctypes.c_uint()
    place = ctypes.c_ulonglong(address)
    status: int = ctypes.CDLL(_driver.DRIVER).cuPointerGetAttribute(ctypes.byref(found), MEMORY_TYPE, place)
    return status == 0 and found.value == OF_HOST


def locks_pages() -> bool:
    """Whether the driver has page-locked a staged window's copy on the host, which is the first large one in fog's arena."""
    x = torch.zeros(4 * MIB, dtype=torch.uint8, device=windows.start("staged"))
    with windows.window_of(x, "staged"):
        if device_training.GPU == device_double.DEVICE:
            return bool(device_double.load_driver().device_double_calls(b"cuMemHostRegister_v2"))
        with open("/proc/self/maps") as maps:  # other ranks' arenas are among them
            begins = [int(line.split("-")[0], 16) for line in maps if "fog_arena" in line]
        return any(is_locked(begin + number * MIB) for begin in begins for number in range(1024))


def test_staged_windows_are_page_locked(new_window_world):
    assert new_window_world(2).run(on_gpu, locks_pages) == [True, True]
