"""Trains optimizers, wrapper and algorithms on a device: the numbers are the CPU's, and the host never waits.

The device is the fake one of tests/device_double; tests/gpu runs the same tests on CUDA.
"""

from __future__ import annotations

import device_double
import device_training
import pytest
import test_decentralized_ddp
import test_optimizers
import torch
import training_cases
from device_double import DEVICE

Run = test_optimizers.Run
EXACT = {"rtol": 1e-11, "atol": 1e-12}

OPTIMIZER_RUNS = [
    *(Run(kind, "adamw") for kind in ("awc", "atc", "gradient")),
    *(Run(kind, "sgd", every=3, passes=3) for kind in ("awc", "atc", "gradient")),
    Run("awc", "adam", mixing="dynamic"),
    Run("atc", "sgd", mixing="machines"),
    Run("atc", "sgd", mixing="allreduce"),
    Run("atc", "adamw", in_backward=True),
    Run("atc", "sgd", in_backward=True, mixing="dynamic"),
]


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_double: None) -> None:
    """Compiles the fake CUDA runtime too, because ranks would take too long to compile it."""
    device_double.compile_runtime()


@pytest.mark.parametrize("run", OPTIMIZER_RUNS, ids=str)
def test_optimizers_as_on_the_cpu(worlds, run):
    world = worlds(4)
    found, expected = (world.run(device_training.of_optimizer, run, device) for device in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


WRAPPER_RUNS = [
    test_decentralized_ddp.Run("adamw", "one-peer"),
    test_decentralized_ddp.Run("sgd", "star", local=True, schedule=True),
    test_decentralized_ddp.Run("adamw", passes=3, clip=True, schedule=True, function=True),
    test_decentralized_ddp.Run("sgd", "matching", then="group", closure=True, local=True),
]


@pytest.mark.parametrize("run", WRAPPER_RUNS, ids=str)
def test_wrapper_as_on_the_cpu(worlds, run):
    world = worlds(4)
    found, expected = (world.run(device_training.of_wrapper, run, device) for device in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("name", training_cases.ON_DEVICES)
def test_algorithms_as_on_the_cpu(worlds, name):
    world = worlds(3)
    found, expected = (world.run(device_training.of_algorithm, name, device) for device in (DEVICE, "cpu"))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "overflow"])
@pytest.mark.parametrize("kind", ["awc", "atc", "gradient", "wrapper"])
def test_gradient_scaler_as_on_the_cpu(worlds, kind, overflow):
    world = worlds(3)
    found, expected = (
        world.run(device_training.of_scaler, kind, device, overflow) for device in (DEVICE, "cpu")
    )
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)  # torch unscales by a float32


WINDOW_RUNS = [Run("awc", "adamw"), Run("awc", "sgd", every=3)]


@pytest.mark.parametrize("run", WINDOW_RUNS, ids=str)
@pytest.mark.parametrize("kind", training_cases.WINDOWS)
def test_window_optimizers_as_on_the_cpu(worlds, kind, run):
    world = worlds(3)
    found = world.run(device_training.of_windows, kind, run, DEVICE, 1e-4)
    expected = world.run(device_training.of_windows, kind, run, "cpu", 1e-4)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


def test_asynchronous_wrapper_in_turns_as_on_the_cpu(worlds):
    world = worlds(3)
    found = world.run(device_training.asynchronously, DEVICE, None, True)
    expected = world.run(device_training.asynchronously, "cpu", None, True)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize("max_staleness", [0, 2, None])
def test_asynchronous_wrapper_comes_to_its_end(worlds, max_staleness):
    results = worlds(3).run(device_training.asynchronously, DEVICE, max_staleness, False)
    means = [mean for _, mean in results]
    assert all(torch.equal(mean, means[0]) for mean in means) and means[0].isfinite().all()


def test_asynchronous_gossip(worlds):
    device_training.check_gossip(worlds(3).run(device_training.gossip, DEVICE))


@pytest.mark.parametrize("kind", ["atc", "gradient"])
def test_gradients_that_come_in_another_order_on_each_rank(worlds, kind):
    """On a device, operations match by order, so buckets are sent in one order, whichever is complete first."""
    world = worlds(4)
    found, expected = (
        world.run(device_training.in_another_order, kind, device) for device in (DEVICE, "cpu")
    )
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **EXACT)


def test_ranks_with_models_on_different_devices(worlds):
    errors = worlds(3).run(device_training.ranks_on_other_devices, DEVICE)
    assert len(set(errors)) == 1 and f"on {DEVICE}" in errors[0] and "ranks [0, 2]" in errors[0], errors


@pytest.mark.parametrize(
    "kind", ["awc", "atc", "atc in backward", "gradient", "wrapper", *training_cases.ON_DEVICES]
)
def test_no_step_reads_the_device(worlds, kind):
    reads = worlds(3).run(device_training.reads_of_steps, kind, DEVICE)
    if kind in ("GradientTracking", "QuasiGlobalMomentum"):
        # One read in each of the four steps finds out whether parameters without a gradient must move.
        assert [len(names) for names in reads] == [4] * 3, reads
    else:
        assert reads == [[]] * 3


@pytest.mark.parametrize("kind", ["awc", "atc", "gradient", "wrapper"])
def test_a_scaled_step_reads_once_whether_gradients_overflowed(worlds, kind):
    reads = worlds(3).run(device_training.reads_of_scaled_steps, kind, DEVICE)
    assert reads == [["aten._local_scalar_dense.default"] * 3] * 3
