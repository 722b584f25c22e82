"""Runs tests/test_device_windows.py on GPUs, without the tests that only the fake device can run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import device_double
import device_training
import pytest
import test_device_windows as windows
import torch


def on_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    windows.used["type"] = device_training.GPU
    return function(*arguments)


@pytest.mark.parametrize("numel", [1, 100_003])
@pytest.mark.parametrize("dtype", windows.DTYPES)
def test_bits_are_those_of_the_cpu(window_worlds, dtype, numel):
    window_worlds(2).run(on_gpu, windows.same_as_on_the_cpu, dtype, numel)


@pytest.mark.parametrize("mutex", [False, True], ids=["free", "mutex"])
@pytest.mark.parametrize("kind", ["put", "accumulate", "get"])
def test_nothing_is_torn(window_worlds, kind, mutex):
    _, *readers = window_worlds(3).run(on_gpu, windows.race, kind, mutex)
    assert all(looks > 1 and seen > 1 for looks, seen, _ in readers), f"too little was seen: {readers}"


@pytest.mark.parametrize(("dtype", "numel"), [("float64", 1), ("float32", 1_000_000), ("bfloat16", 20_000)])
def test_mass_is_conserved(window_worlds, dtype, numel):
    for least, most, p, moves in window_worlds(3).run(on_gpu, windows.tokens, "name", dtype, numel):
        assert (least, most, p) == (60, 60, 3)
        assert moves > 1


def test_mutexes_exclude(window_worlds):
    window_worlds(2).run(on_gpu, windows.exclusion, 30.0)


@pytest.mark.parametrize(
    "function",
    [windows.held_mutex, windows.published, windows.raw_writes, windows.bad_arguments],
    ids=lambda function: function.__name__,
)
def test_what_the_double_is_tested_with(window_worlds, function):
    window_worlds(2).run(on_gpu, function)


MIB = 1 << 20
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
OF_HOST = 1  # CU_MEMORYTYPE_HOST


def is_locked(address: int) -> bool:
    """Returns whether the driver knows an address as host memory."""
    found = ctypes.c_uint()
    place = ctypes.c_ulonglong(address)
    status: int = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(found), MEMORY_TYPE, place)
    return status == 0 and found.value == OF_HOST


def locks_pages() -> bool:
    """Returns whether the window's copy on the host, the first large one in fog's arena, is page-locked."""
    x = torch.zeros(4 * MIB, dtype=torch.uint8, device=windows.start())
    with windows.window_of(x):
        if device_training.GPU == device_double.DEVICE:
            return bool(device_double.load_runtime().device_double_locked())
        with open("/proc/self/maps") as maps:  # these include other ranks' arenas
            begins = [int(line.split("-")[0], 16) for line in maps if "fog_arena" in line]
        return any(is_locked(begin + number * MIB) for begin in begins for number in range(1024))


def test_staged_windows_are_page_locked(new_window_world):
    assert new_window_world(2).run(on_gpu, locks_pages) == [True, True]
