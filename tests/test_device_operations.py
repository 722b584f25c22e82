"""Compares operations on the fake device with those on the CPU; tests/gpu runs these functions on CUDA."""

from __future__ import annotations

import device_double
import device_operations
import pytest
import test_neighbor
from device_double import DEVICE
from harness import sizes


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Compiles the fake device once, before ranks load it."""
    device_double.load()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", device_operations.COLLECTIVES)
def test_collectives(worlds, name, size):
    worlds(size).run(device_operations.collectives, name, DEVICE)


@pytest.mark.parametrize("size", sizes([1, 3], [2, 4]))
def test_neighbor_exchanges(worlds, size):
    worlds(size).run(device_operations.neighbor_exchanges, DEVICE)


@pytest.mark.parametrize(
    "function",
    [device_operations.many_in_flight, device_operations.on_other_streams, device_operations.gradients],
    ids=lambda function: function.__name__,
)
def test_order_and_gradients(worlds, function):
    worlds(2).run(function, DEVICE)


@pytest.mark.parametrize(
    "function, arguments",
    [(test_neighbor.own_weights, ()), (test_neighbor.static_exchanges, (("exp", "star"),))],
    ids=["own_weights", "static_exchanges"],
)
def test_what_the_cpu_is_tested_with(worlds, function, arguments):
    worlds(4).run(device_operations.run_through, DEVICE, function, *arguments)
