"""What windows of device tensors promise, on GPUs: tests/test_device_windows.py without what only its double can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_device_windows as windows

SECONDS = 1.0


def on_cuda(function: Callable[..., Any], *arguments: Any) -> Any:
    windows.used["type"] = "cuda"
    return function(*arguments)


@pytest.fixture(params=windows.TRANSPORTS)
def run(request, new_world, gpu_environment):
    """Calls a function of the CPU machine's tests with a transport first; ranks that stage have no driver of fog's."""

    def call(size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        world = new_world(size, timeout=60.0, environment=gpu_environment(size))
        return world.run(on_cuda, function, request.param, *arguments)

    return call


@pytest.mark.parametrize("numel", [1, 100_003])
@pytest.mark.parametrize("dtype", windows.DTYPES)
def test_bits_are_those_of_the_cpu(run, dtype, numel):
    run(2, windows.same_as_on_the_cpu, dtype, numel)


@pytest.mark.parametrize("mutex", [False, True], ids=["free", "mutex"])
@pytest.mark.parametrize("kind", ["put", "accumulate", "get"])
def test_nothing_is_torn(run, kind, mutex):
    _, *readers = run(3, windows.race, kind, mutex, SECONDS)
    assert all(looks > 1 and seen > 1 for looks, seen in readers), f"too little was seen: {readers}"


@pytest.mark.parametrize(("dtype", "numel"), [("float64", 1), ("float32", 1_000_000), ("bfloat16", 20_000)])
def test_mass_is_conserved(run, dtype, numel):
    for least, most, p, passed, collected in run(3, windows.tokens, dtype, numel, SECONDS):
        assert (least, most, p) == (60, 60, 3)
        assert min(passed, collected) > 1


def test_mutexes_exclude(run):
    first, _ = run(2, windows.exclusion, 30)
    assert first > 1


@pytest.mark.parametrize(
    "function",
    [windows.held_mutex, windows.published, windows.raw_writes, windows.bad_arguments],
    ids=lambda function: function.__name__,
)
def test_what_the_double_is_tested_with(run, function):
    run(2, function)
