"""Tests with several ranks, each with a GPU or a part of one: the results equal those on the CPU."""

from __future__ import annotations

import device_operations
import device_training
import pytest
import test_decentralized_ddp
import test_optimizers
import torch
import training_cases
from test_random_exchanges import check_random, run_cases

DEVICE = device_training.GPU
EXACT = {"rtol": 1e-9, "atol": 1e-10}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", device_operations.COLLECTIVES)
def test_collectives(gpu_worlds, name, size):
    gpu_worlds(size).run(device_operations.collectives, name, DEVICE)


@pytest.mark.parametrize("size", [2, 4])
def test_neighbor_exchanges(gpu_worlds, size):
    check_random(gpu_worlds, size, 24, run_cases, DEVICE, True)


@pytest.mark.parametrize(
    "function",
    [
        device_operations.compressed_lists,
        device_operations.compressed_exchanges,
        device_operations.compressed_machines,
    ],
)
def test_compressed_exchanges(gpu_worlds, function):
    gpu_worlds(4).run(function, DEVICE, timeout=200.0)


@pytest.mark.parametrize(
    "function",
    [
        device_operations.many_in_flight,
        device_operations.on_other_streams,
        device_operations.gradients,
        device_operations.messages,
    ],
)
def test_order_and_gradients(gpu_worlds, function):
    gpu_worlds(2).run(function, DEVICE)


RUNS = [
    *(test_optimizers.Run(kind, "adamw") for kind in ("awc", "atc", "gradient")),
    test_optimizers.Run("awc", "adam", mixing="dynamic"),
    test_optimizers.Run("atc", "sgd", mixing="machines"),
    test_optimizers.Run("atc", "adamw", in_backward=True),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_steps_of_optimizers(gpu_worlds, run):
    world = gpu_worlds(4)
    found, expected = (world.run(device_training.of_optimizer, run, d) for d in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("kind", training_cases.WINDOWS)
def test_steps_of_window_optimizers(gpu_worlds, kind):
    run = test_optimizers.Run("awc", "adamw")
    world = gpu_worlds(2)
    found, expected = (world.run(device_training.of_windows, kind, run, d) for d in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("topology", ["one-peer", "star"])
def test_wrapper(gpu_worlds, topology):
    run = test_decentralized_ddp.Run("adamw", topology)
    world = gpu_worlds(4)
    found, expected = (world.run(device_training.of_wrapper, run, d) for d in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("name", training_cases.ON_DEVICES)
def test_algorithms(gpu_worlds, name):
    world = gpu_worlds(2)
    found, expected = (world.run(device_training.of_algorithm, name, d) for d in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


def test_asynchronous_gossip(gpu_worlds):
    device_training.check_gossip(gpu_worlds(2).run(device_training.gossip, DEVICE))


@pytest.mark.parametrize("kind", ["awc", "atc", "atc in backward", "gradient", "wrapper", "DiLoCo"])
def test_no_step_reads_the_device(gpu_worlds, kind):
    assert gpu_worlds(2).run(device_training.reads_of_steps, kind, DEVICE) == [[]] * 2
