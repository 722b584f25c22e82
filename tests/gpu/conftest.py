"""What tests on GPUs need: a GPU, and where ranks share one an NCCL that lets them, unless nothing of a test goes over NCCL.

Ranks are processes of their own. Where there are fewer GPUs than ranks, NCCL has to be 2.30.3 or later: the one that torch
has, or another one that FOG_TEST_NCCL names, /path/libnccl.so.2, which ranks then have in LD_PRELOAD. Windows go over the
host's memory, and several ranks may have theirs on one GPU with any NCCL.

FOG_TEST_GPU=gpudouble runs one of each test on the fake device: tests/test_gpu_tests.py does, where no GPU is.
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
# As NCCL's documentation has it for ranks that share a GPU; each needs multiprocessors of its own.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
# Each stream with a hardware queue of its own, as far as there are any: a kernel that waits for another rank then stands in
# the way of no other stream.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
# A rank that is alone does all that one of several does.
ALONE = {"FOG_EXCHANGE_ALONE": "1"}

if os.environ.get(NCCL_VARIABLE):
    # Before the server that ranks are forked from starts: a library is preloaded when a program begins.
    os.environ["LD_PRELOAD"] = ":".join(
        filter(None, (os.environ[NCCL_VARIABLE], os.environ.get("LD_PRELOAD")))
    )


def gpus() -> int:
    """How many GPUs there are; CUDA itself is not started in this process. All ranks share one double."""
    if device_training.GPU != "cuda":
        return 1
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them where there is no GPU. On the double one of each is enough."""
    here = Path(__file__).parent
    if device_training.GPU != "cuda":
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [item for item in items if item in first.values()]
    reason = None
    if device_training.GPU == "cuda" and not torch.backends.cuda.is_built():
        reason = f"needs a GPU: torch {torch.__version__} is built without CUDA"
    elif gpus() == 0:
        reason = f"needs a GPU: torch {torch.__version__} finds none"
    elif harness.BACKEND != "fog":
        reason = f"for backend fog, not {harness.BACKEND}"
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """Ranks have no time to compile the double."""
    if device_training.GPU == device_double.DEVICE:
        device_double.compile_double()
        device_double.compile_runtime()


@pytest.fixture(scope="session")
def sharing_environment() -> dict[str, str] | str:
    """What ranks that share a GPU need in their environment for NCCL, or why they cannot."""
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
    """``gpu_worlds(n)`` is a world of n ranks, each with a GPU or with a part of one; skips where NCCL cannot do that."""
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
    """Makes such a world for one test, which may kill ranks of it."""
    made: list[harness.World] = []

    def make(size: int) -> harness.World:
        made.append(harness.World(size, timeout=60.0))
        return made[-1]

    yield make
    harness.close_all(made)
