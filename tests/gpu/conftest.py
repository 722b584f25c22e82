"""Fixtures of tests on GPUs, which skip tests without a GPU, or with shared GPUs if NCCL cannot share them.

Ranks are separate processes. If there are fewer GPUs than ranks, NCCL has to be 2.30.3 or later: torch's own, or
another one that FOG_TEST_NCCL names, /path/libnccl.so.2, and that ranks then have in LD_PRELOAD. Windows go through the
host's memory, so several ranks may have windows on one GPU with any NCCL.

FOG_TEST_GPU=gpudouble runs one case of each test on the fake device; tests/test_gpu_tests.py does this if there is no
GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import device_double
import device_operations
import device_training
import harness
import pytest
import torch

# Names a newer libnccl.so.2 than torch's own.
NCCL_VARIABLE = "FOG_TEST_NCCL"
# The settings of NCCL's documentation for ranks that share a GPU; each rank needs its own multiprocessors.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
# Gives each stream its own hardware queue, as far as there are any, so a kernel that waits for another rank does not
# block other streams.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# Makes a rank that is alone do everything that one of several does.
ALONE = {"FOG_EXCHANGE_ALONE": "1"}

if os.environ.get(NCCL_VARIABLE):
    # A library is preloaded when a program starts, so this comes before the fork server of the ranks starts.
    os.environ["LD_PRELOAD"] = ":".join(
        filter(None, (os.environ[NCCL_VARIABLE], os.environ.get("LD_PRELOAD")))
    )


def gpus() -> int:
    """Returns the number of GPUs, without starting CUDA in this process. All ranks share one fake device."""
    if device_training.GPU != "cuda":
        return 1
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them without a GPU. On the fake device, one case of each is enough."""
    here = Path(__file__).parent
    if device_training.GPU != "cuda":
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [item for item in items if item in first.values()]
    reason = None
    if device_training.GPU == "cuda" and not torch.backends.cuda.is_built():
        reason = f"needs a GPU: torch {torch.__version__} is built without CUDA"
    elif gpus() == 0:
        reason = f"needs a GPU: torch {torch.__version__} finds none"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Compiles the fake device, because ranks would take too long to compile it."""
    if device_training.GPU == device_double.DEVICE:
        device_double.compile_double()
        device_double.compile_runtime()


@pytest.fixture(scope="session")
def sharing_environment() -> dict[str, str] | str:
    """Returns the environment that lets ranks share a GPU in NCCL, or the reason why they cannot."""
    if device_training.GPU != "cuda":
        return {}
    world = harness.World(1, initialize=False)
    try:
        (version,) = world.run(device_operations.nccl_version)
    finally:
        world.close()
    needed = device_operations.devices().SHARING_VERSION
    if version is None:
        return "ranks that share a GPU need NCCL, and none is loaded"
    if version < needed:
        return (
            f"ranks that share a GPU need NCCL {'.'.join(map(str, needed))}, and {'.'.join(map(str, version))} is loaded; "
            f"{NCCL_VARIABLE}=/path/libnccl.so.2 names another one"
        )
    return SHARING


@pytest.fixture(scope="module")
def gpu_worlds(request: pytest.FixtureRequest) -> Iterator[Callable[[int], harness.World]]:
    """``gpu_worlds(n)`` is a world of n ranks, each with a GPU or a part of one; skips the test if NCCL cannot share."""
    made: dict[int, harness.World] = {}

    def environment_of(size: int) -> dict[str, str]:
        if size <= gpus():
            return QUEUES | ALONE if size == 1 else QUEUES
        environment = request.getfixturevalue("sharing_environment")
        if isinstance(environment, str):
            pytest.skip(f"{size} ranks, {gpus()} GPUs: {environment}")
        return QUEUES | environment

    def world_of(size: int) -> harness.World:
        world = made.get(size)
        if world is None or world.broken:
            world = made[size] = harness.World(size, timeout=60.0, environment=environment_of(size))
        return world

    yield world_of
    harness.close_all(list(made.values()))


@pytest.fixture(scope="module")
def window_worlds() -> Iterator[Callable[[int], harness.World]]:
    """``window_worlds(n)`` is a world of n ranks for windows, which may share a GPU with any NCCL."""
    made: dict[int, harness.World] = {}

    def world_of(size: int) -> harness.World:
        world = made.get(size)
        if world is None or world.broken:
            world = made[size] = harness.World(size, timeout=60.0)
        return world

    yield world_of
    harness.close_all(list(made.values()))


@pytest.fixture
def new_window_world() -> Iterator[Callable[[int], harness.World]]:
    """Makes such a world for one test, which may kill its ranks."""
    made: list[harness.World] = []

    def make(size: int) -> harness.World:
        made.append(harness.World(size, timeout=60.0))
        return made[-1]

    yield make
    harness.close_all(made)
