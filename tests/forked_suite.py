"""Runs PyTorch's own distributed suite with forked ranks, in a fraction of the time, and with more of its cases.

    python tests/forked_suite.py ../shared/conformance/torch_distributed_suite.py [options of unittest]

The driver starts every rank of every case as a new interpreter, which first imports torch and the whole suite. This
takes most of its twenty minutes. Here one process imports them, and ranks are forked from it. It has run no operation,
so its children are as fresh as new interpreters. The driver's environment variables work here too.

Some cases that run on Gloo are closed to other backends under the driver: object collectives, coalesced allreduces and
monitored barriers. Their conditions, which ask for Gloo in another form, are opened here too.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.testing._internal import common_distributed


@contextlib.contextmanager
def further_gates_open(backend: str) -> Iterator[None]:
    """Opens conditions for `backend` that the driver leaves closed, in the source that it reads in this block."""
    features = common_distributed.DistTestCases.backend_feature
    for feature in ("gpu", "plugin"):  # "gpu" guards cases for CPU tensors too
        features[feature].add(backend)
    read_text = Path.read_text

    def opened(path: Path, *arguments: Any, **keywords: Any) -> str:
        text = read_text(path, *arguments, **keywords)
        return text.replace('is_available({"gloo"})', f'is_available({{"gloo", "{backend}"}})')

    Path.read_text = opened  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.read_text = read_text  # type: ignore[method-assign]


def load_driver(path: Path) -> types.ModuleType:
    """Returns the driver as a module; it reads SUITE_BACKEND and SUITE_WORLD_SIZE while it is loaded."""
    spec = importlib.util.spec_from_file_location("torch_distributed_suite", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with further_gates_open(os.environ.get("SUITE_BACKEND", "fog")):
        spec.loader.exec_module(module)
    return module


def _run_rank(run: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    status = 1
    common_distributed.tmp_dir._finalizer.detach()  # the folder belongs to the parent, which removes it
    try:
        run(*arguments, **keywords)
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    # Forked processes of multiprocessing leave with os._exit; spawned ones leave as a script does, through atexit.
    ctypes.pythonapi.Py_Exit(status)


def _process(*, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return multiprocessing.get_context("fork").Process(
        target=_run_rank, name=name, args=(target, args, kwargs)
    )


def main() -> int:
    """Runs the cases of the command line; returns 0 if none failed."""
    driver = load_driver(Path(sys.argv.pop(1)).resolve())
    suite = driver.TorchDistributedSuite
    suite._spawn_processes = lambda self: self._start_processes(_process)
    program = unittest.main(
        module=driver,
        testRunner=unittest.TextTestRunner(resultclass=driver.ReportingResult),
        exit=False,
    )
    result = program.result
    failed = len(result.failures) + len(result.errors)
    skipped = len(result.skipped)
    print(f"{result.testsRun - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
