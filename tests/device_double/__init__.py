"""A fake device of torch for tests: it behaves as a GPU does, in the memory of the host.

``load()``, in a rank, registers it with torch as the device type ``gpudouble`` with two devices. The process that
starts the ranks compiles it before, by ``compile_double()`` (fixture ``compiled_double``). Memory, streams, events and
autograd are those of a device. Most operations of torch run on the host at once, after the earlier work of the current
stream. Fog's weighted sums, copies that do not block and the delegate's operations are enqueued on a stream (see
streams.hpp) and run on a thread of that stream. A test can hold the thread back, so a missing wait always shows, as
wrong numbers.

Memory is overwritten when it is freed, except for streams that were recorded on it.

``serve_groups()`` gives each group of fog a ``RecordingDelegate``, which stands in for ProcessGroupNCCL: it
communicates over Gloo on streams of its own, connects at the first operation, and records every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

DEVICE = "gpudouble"

_HERE = Path(__file__).resolve().parent
_BUILD = _HERE.parents[1] / "build" / "device_double"
_COMPILE_SECONDS = 600


def build(
    name: str,
    sources: Sequence[str],
    *,
    flags: Sequence[str] = (),
    links: Sequence[str] = (),
    library: bool = False,
    where: Path = _HERE,
) -> Path:
    """Compiles C++ sources of a folder into a shared object, unless that has been done for the same sources.

    All processes of a checkout share the result, under ``build/``; one compiles while the others wait.

    Args:
        name: Name of the shared object; for an extension module, the module's name.
        sources: Names of files in the folder. Files of the folder that they include count too.
        flags: More arguments for the compiler.
        links: More arguments for the linker.
        library: Whether it is a plain library, without torch.
        where: The folder, by default this one.

    Returns:
        Path of the shared object.

    Raises:
        RuntimeError: The compiler failed; the message is the compiler's.
    """
    command = [
        os.environ.get("CXX", "g++"),
        "-O1",
        "-g0",
        "-fPIC",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
    ]
    command += ["-fvisibility=hidden", f"-std={_standard()}", *flags]
    link = list(links)
    if not library:
        package = Path(torch.__file__).parent
        command += [f"-I{package / 'include'}", f"-I{package / 'include/torch/csrc/api/include'}"]
        command += [f"-I{sysconfig.get_paths()['include']}", f"-DTORCH_EXTENSION_NAME={name}"]
        link += [f"-L{package / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    digest = hashlib.sha256("\0".join([*command, *link, sys.version, torch.__version__, *sources]).encode())
    for file in sorted(where.glob("*.[ch]*pp")):
        if file.suffix == ".hpp" or file.name in sources:
            digest.update(file.name.encode() + file.read_bytes())
    folder = _BUILD / f"{name}-{digest.hexdigest()[:16]}"
    target = folder / f"{name}.so"
    if target.exists():
        return target
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it if this process dies
        if target.exists():
            return target
        for old in _BUILD.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir()
        objects = [folder / f"{Path(source).stem}.o" for source in sources]
        _run(
            [
                [*command, "-c", str(where / source), "-o", str(o)]
                for source, o in zip(sources, objects, strict=True)
            ]
        )
        unfinished = folder / "unfinished.so"
        _run([[command[0], "-shared", "-pthread", *map(str, objects), "-o", str(unfinished), *link]])
        unfinished.rename(target)
    return target


def _run(commands: Sequence[Sequence[str]]) -> None:
    """Runs several compilers at the same time."""
    processes = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands
    ]
    outputs = [process.communicate(timeout=_COMPILE_SECONDS)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"cannot compile the fake device:\n{output[-8000:]}")


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _standard() -> str:
    return "c++20" if _version() >= (2, 13) else "c++17"  # as torch's headers require


def compile_double() -> Path:
    """Compiles the fake device if needed, in the process that starts the ranks, because ranks have no time for it."""
    flags = ["-DDEVICE_DOUBLE_HAS_CAPTURE"] if _version() >= (2, 12) else []
    return build("_device_double", ["device.cpp", "delegate.cpp"], flags=flags)


@functools.cache
def load() -> Any:
    """Registers the fake device as torch's device ``gpudouble`` and returns its extension module.

    Only ranks may call this: a process with a device behaves differently from then on, also for CPU tensors.
    """
    path = compile_double()
    import torch.distributed  # its types are base classes of the fake device's types

    untyped: Any = torch
    untyped.utils.rename_privateuse1_backend(DEVICE)
    spec = importlib.util.spec_from_file_location("_device_double", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    untyped._register_device_module(DEVICE, _device_module(module))
    return module


def compile_runtime() -> Path:
    """Compiles the fake CUDA runtime if needed, as `compile_double` does."""
    # fog finds the runtime by the name of torch's library that is linked with it.
    return build(
        "libdevice_double_runtime", ["runtime.cpp"], links=["-Wl,-soname,libc10_cuda.so"], library=True
    )


@functools.cache
def load_runtime() -> ctypes.CDLL:
    """Lets fog find functions that page-lock memory, in a torch without CUDA. A torch with CUDA has its own.

    Returns:
        The library. In addition to the runtime's functions, ``device_double_refuse(error)`` makes locking fail until
        the error is 0, and ``device_double_locked()`` counts locked memory.
    """
    library = ctypes.CDLL(str(compile_runtime()))
    library.device_double_refuse.argtypes = [ctypes.c_int]
    library.device_double_locked.restype = ctypes.c_long
    return library


def current_stream(device: int | None = None) -> torch.Stream:
    """Returns the stream of this thread's operations on a device, by default the current device."""
    return torch.accelerator.current_stream(None if device is None else torch.device(DEVICE, device))


@contextlib.contextmanager
def held(*streams: torch.Stream) -> Iterator[None]:
    """Holds back work that is enqueued on these streams until the end of the block."""
    extension = load()
    for stream in streams:
        extension.hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        for stream in streams:
            extension.release(stream.device_index, stream.stream_id)


def serve_groups(
    made: list[Any] | None = None,
    *,
    making: Callable[[], object] = int,
    connecting: Callable[[], object] = int,
) -> None:
    """Lets every group of fog serve tensors of the fake device through its own ``RecordingDelegate``.

    Args:
        made: List to which every new delegate is appended.
        making: Called when a delegate is made.
        connecting: Called when a delegate connects.
    """
    import torch.distributed as dist

    from fog_pg._extension import load as load_fog

    extension = load()

    def connect(store: Any, rank: int, size: int, timeout: Any) -> Any:
        connecting()
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def make(store: Any, rank: int, size: int, options: Any, device: torch.device, eager: bool) -> Any:
        making()
        delegate = extension.RecordingDelegate(connect, store, rank, size, options, device)
        if made is not None:
            made.append(delegate)
        return delegate

    load_fog().set_delegate_factory(DEVICE, make)


def _device_module(extension: Any) -> types.ModuleType:
    """Returns the module that torch looks up as ``torch.gpudouble``."""
    module = types.ModuleType(f"torch.{DEVICE}")

    class device_of(contextlib.AbstractContextManager[None]):  # like torch.cuda.device
        def __init__(self, device: Any) -> None:
            self.index = _index(device)

        def __enter__(self) -> None:
            self.before = extension.current_device()
            extension.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            extension.set_device(self.before)

    def _index(device: Any) -> int:
        if device is None:
            return int(extension.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(extension.current_device()) if index is None else index

    attributes: dict[str, Any] = {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": extension.current_device,
        "current_stream": lambda device=None: current_stream(_index(device)),
        "device": device_of,
        "device_count": extension.device_count,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "set_device": lambda device: extension.set_device(_index(device)),
        "set_stream": torch.accelerator.set_stream,
        "stream": lambda stream: stream,  # a torch.Stream is its own context manager
        "synchronize": lambda device=None: extension.synchronize(_index(device)),
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
