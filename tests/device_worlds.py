"""Worlds of ranks with a device each, for tests that run on the fake device and on GPUs.

The device is the fake one of tests/device_double, or with ``FOG_TEST_DEVICE=cuda`` (``make test-gpu``) a GPU. A test
file that runs on both has ``pytestmark = device_worlds.MARKS`` and ``WORLDS = device_worlds.DeviceWorlds``, which the
fixture ``worlds`` uses.

If there are fewer GPUs than ranks, NCCL has to be 2.30.3 or later: torch's own, or another one that FOG_TEST_NCCL
names, /path/libnccl.so.2, and that ranks then have in LD_PRELOAD. Windows go through the host's memory, so several
ranks may have windows on one GPU with any NCCL.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import device_double
import harness
import pytest
import torch
from fogdist.context import Context
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The type of device of these tests.
DEVICE = os.environ.get("FOG_TEST_DEVICE", device_double.DEVICE)
ON_GPUS = DEVICE == "cuda"
# Names a newer libnccl.so.2 than torch's own.
NCCL_VARIABLE = "FOG_TEST_NCCL"
# The settings of NCCL's documentation for ranks that share a GPU; each rank needs its own multiprocessors.
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
# Gives each stream its own hardware queue, as far as there are any, so a kernel that waits for another rank does not
# block other streams.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}

if ON_GPUS and os.environ.get(NCCL_VARIABLE):
    # A library is preloaded when a program starts, so this comes before the fork server of the ranks starts.
    os.environ["LD_PRELOAD"] = ":".join(
        filter(None, (os.environ[NCCL_VARIABLE], os.environ.get("LD_PRELOAD")))
    )


def gpus() -> int:
    """Returns the number of GPUs, without starting CUDA in this process."""
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


NO_GPU = ON_GPUS and gpus() == 0
MARKS = [pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a GPU")]
on_the_double_only = pytest.mark.skipif(ON_GPUS, reason="holds streams of the fake device")
on_gpus_only = pytest.mark.skipif(not ON_GPUS, reason="needs a GPU")


def sizes(several: int) -> list[int]:
    """Returns the numbers of ranks of a test; one GPU is enough for one rank, with any NCCL."""
    return [1, several] if ON_GPUS else [several]


class WindowWorlds(harness.WorldPool):
    """Worlds for windows, whose ranks may share a GPU with any NCCL."""

    def __init__(self) -> None:
        super().__init__(timeout=60.0)
        if not ON_GPUS:  # ranks would take too long to compile it
            device_double.compile_double()
            device_double.compile_runtime()


class DeviceWorlds(WindowWorlds):
    """Worlds whose ranks have a GPU each, or a part of one; a test is skipped if NCCL cannot share a GPU."""

    def __call__(self, size: int) -> harness.World:
        self._options["environment"] = environment(size)
        return super().__call__(size)


def environment(size: int) -> dict[str, str]:
    """Returns the environment of ranks that have a GPU each, or a part of one; skips the test if NCCL cannot do that."""
    if not ON_GPUS or size <= gpus():
        return QUEUES
    if isinstance(shared := _sharing(), str):
        pytest.skip(f"{size} ranks, {gpus()} GPUs: {shared}")
    return shared | QUEUES


@functools.cache
def _sharing() -> dict[str, str] | str:
    """Returns the environment that lets ranks share a GPU in NCCL, or the reason why they cannot."""
    world = harness.World(1, initialize=False)
    try:
        (version,) = world.run(nccl_version)
    finally:
        world.close()
    needed = devices_of_examples().SHARING_VERSION
    if version is not None and version >= needed:
        return SHARING
    loaded = "none" if version is None else ".".join(map(str, version))
    return (
        f"ranks that share a GPU need NCCL {'.'.join(map(str, needed))}, and {loaded} is loaded; "
        f"{NCCL_VARIABLE}=/path/libnccl.so.2 names another one"
    )


def devices_of_examples() -> ModuleType:
    """Imports examples/devices.py under another name, because tests of the examples import and remove that module."""
    path = Path(__file__).resolve().parents[1] / "examples" / "devices.py"
    spec = importlib.util.spec_from_file_location("devices_of_examples", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of NCCL that this process has loaded."""
    version: tuple[int, int, int] | None = devices_of_examples().nccl_version()
    return version


# --- in the ranks -------------------------------------------------------------------------------------------


def place(device: str = DEVICE) -> torch.device:
    """Returns this rank's device of a type, ready for groups of fog and windows. A rank alone works like one of several."""
    Context.exchanges_alone = True
    if device == device_double.DEVICE:
        return _ready_double()
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
        return chosen
    return torch.device(device)


@functools.cache
def _ready_double() -> torch.device:
    device_double.load()
    device_double.load_runtime()
    device_double.serve_groups()
    return torch.device(device_double.DEVICE, 0)


# Operations whose values the host needs.
_SCALARS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class HostReads(TorchDispatchMode):
    """Collects, while it is active, the names of operations that read a device's values on the host.

    Backward passes count too, on any thread of autograd.

    Attributes:
        names: Names of the operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
            for tree in ((args, kwargs), result)
        )
        used = any(x.device.type not in ("cpu", "meta") for x in given)
        reads = any(x.is_cpu for x in made) or any(f"aten.{name}." in str(func) for name in _SCALARS)
        if used and reads:
            self.names.append(str(func))
        return result


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """On CUDA, torch raises RuntimeError in this block if the host waits for the device."""
    if not ON_GPUS:
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
