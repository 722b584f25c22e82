"""Fixtures shared by all tests: worlds of ranks, and the check that nothing of them stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import harness

# How long the system may take to remove what ended ranks held.
SETTLE_SECONDS = 5.0


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the session if a process or a shared-memory segment of a rank is there after the last test."""
    before = harness.shared_memory_entries()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        processes = harness.leftover_processes()
        segments = harness.shared_memory_entries() - before
        if segments:  # of other programs, if they are in use
            segments -= harness.in_use(segments)
        if not processes and not segments:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    pytest.fail(
        f"left behind by ranks: processes {processes}, /dev/shm entries {sorted(segments)}", pytrace=False
    )


@pytest.fixture
def no_shared_memory_left() -> Iterator[None]:
    """Fail the test if it leaves a name in /dev/shm that nobody uses."""
    before = harness.shared_memory_entries()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := harness.shared_memory_entries() - before:
        left -= harness.in_use(left)
        if not left:
            return
        assert time.monotonic() < deadline, f"left in /dev/shm: {sorted(left)}"
        time.sleep(0.1)


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
