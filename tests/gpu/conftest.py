"""What tests on GPUs need: a GPU, and for several ranks as many GPUs or an NCCL that lets them share one.

Ranks are processes of their own. Where there are fewer GPUs than ranks, NCCL has to be 2.30.3 or later: the one that torch
has, or another one that FOG_TEST_NCCL names, /path/libnccl.so.2, which ranks then have in LD_PRELOAD.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import device_operations
import harness
import pytest
import torch

# Names a newer libnccl.so.2 than torch's own.
NCCL_VARIABLE = "FOG_TEST_NCCL"
# As NCCL's documentation has it for ranks that share a GPU; each needs multiprocessors of its own.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}

if os.environ.get(NCCL_VARIABLE):
    # Before the server that ranks are forked from starts: a library is preloaded when a program begins.
    os.environ["LD_PRELOAD"] = ":".join(
        filter(None, (os.environ[NCCL_VARIABLE], os.environ.get("LD_PRELOAD")))
    )


def gpus() -> int:
    """How many GPUs there are; CUDA itself is not started in this process."""
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them where there is no GPU."""
    here = Path(__file__).parent
    reason = None
    if not torch.backends.cuda.is_built():
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


@pytest.fixture(scope="session")
def sharing_environment() -> dict[str, str] | str:
    """What ranks that share a GPU need in their environment, or why they cannot."""
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


@pytest.fixture(scope="session")
def gpu_environment(request: pytest.FixtureRequest) -> Callable[[int], dict[str, str]]:
    """What a number of ranks needs in its environment; skips where there are too few GPUs."""

    def environment_of(size: int) -> dict[str, str]:
        if size <= gpus():
            return {}
        environment = request.getfixturevalue("sharing_environment")
        if isinstance(environment, str):
            pytest.skip(f"{size} ranks, {gpus()} GPUs: {environment}")
        return dict(environment)

    return environment_of


@pytest.fixture(scope="module")
def gpu_worlds(gpu_environment: Callable[[int], dict[str, str]]) -> Iterator[Callable[[int], harness.World]]:
    """``gpu_worlds(n)`` is a world of n ranks, each with a GPU or with a part of one; skips where that cannot be."""
    made: dict[int, harness.World] = {}

    def world_of(size: int) -> harness.World:
        world = made.get(size)
        if world is None or world.broken:
            world = made[size] = harness.World(size, timeout=60.0, environment=gpu_environment(size))
        return world

    yield world_of
    harness.close_all(list(made.values()))
