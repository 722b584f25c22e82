"""Fixtures shared by all tests: worlds of ranks, and the check that nothing of them stays behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import device_double
import harness

# A shell that starts this in the background has SIGINT ignored, and all ranks would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long the system may take to remove what ended ranks held.
SETTLE_SECONDS = 5.0


def _fail_unless_clean(before: set[str], worlds_run: bool = False) -> None:
    """Fail if ranks have left a process, or a shared-memory segment that was not there before.

    Args:
        before: The segments that were there.
        worlds_run: Ranks of worlds may still be there.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        processes = [] if worlds_run else harness.leftover_processes()
        segments = harness.shared_memory_entries() - before
        if segments:  # of other programs, if they are in use
            segments -= harness.in_use(segments)
        if not processes and not segments:
            if not worlds_run:
                harness.forget_sessions()
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    pytest.fail(
        f"left behind by ranks: processes {processes}, /dev/shm entries {sorted(segments)}", pytrace=False
    )


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session if something of a rank is there after the last test."""
    before = harness.shared_memory_entries()
    yield
    _fail_unless_clean(before)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The same for one test; its worlds must be its own, from ``new_world``."""
    before = harness.shared_memory_entries()
    yield
    _fail_unless_clean(before)


@pytest.fixture
def no_shared_memory_left() -> Iterator[None]:
    """The same for one test beside worlds that others share: only names in /dev/shm that nobody uses count."""
    before = harness.shared_memory_entries()
    yield
    _fail_unless_clean(before, worlds_run=True)


@pytest.fixture(scope="session")
def compiled_double() -> None:
    """For tests whose ranks load the device double."""
    device_double.compile_double()


@pytest.fixture(scope="module")
def worlds() -> Iterator[harness.WorldPool]:
    """The module's worlds: ``worlds(n)`` is a process group of n ranks that the tests of a file share."""
    pool = harness.WorldPool()
    yield pool
    pool.close()


@pytest.fixture
def new_world() -> Iterator[Callable[..., harness.World]]:
    """Makes worlds for one test only, for tests that kill ranks or leave a group unusable."""
    made: list[harness.World] = []

    def make(size: int, **options: Any) -> harness.World:
        made.append(harness.World(size, **options))
        return made[-1]

    yield make
    harness.close_all(made)
