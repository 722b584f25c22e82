"""Trains optimizers, wrapper and algorithms on a device: the host never waits, and a sample has the CPU's numbers.

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


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_double: None) -> None:
    """Compiles the fake CUDA runtime too, because ranks would take too long to compile it."""
    device_double.compile_runtime()


# The operations of a device have their own tests, so one run of each kind is enough.
SAMPLES = {
    "optimizer": (device_training.of_optimizer, Run("atc", "adamw", in_backward=True)),
    "wrapper": (
        device_training.of_wrapper,
        test_decentralized_ddp.Run("adamw", passes=3, clip=True, schedule=True, function=True),
    ),
    "window optimizer": (device_training.of_windows, "push-sum", Run("awc", "sgd", every=3)),
    "algorithm": (device_training.of_algorithm, "GradientTracking"),
    "compressed algorithm": (device_training.of_compressed, "ChocoSGD"),
    "scaler": (device_training.of_scaler, "wrapper"),
    "asynchronous wrapper in turns": (device_training.asynchronously,),
    # On a device, operations match by order, so buckets are sent in one order, whichever is complete first.
    "gradients in another order, atc": (device_training.in_another_order, "atc"),
    "gradients in another order, gradient": (device_training.in_another_order, "gradient"),
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_numbers_as_on_the_cpu(worlds, sample):
    function, *arguments = SAMPLES[sample]
    world = worlds(4)
    found, expected = (world.run(function, *arguments, device) for device in (DEVICE, "cpu"))
    # torch unscales by a float32
    limits = {"rtol": 1e-6, "atol": 1e-7} if sample == "scaler" else {"rtol": 1e-11, "atol": 1e-12}
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, **limits)


def test_asynchronous_gossip(worlds):
    device_training.check_gossip(worlds(3).run(device_training.gossip, DEVICE))


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
