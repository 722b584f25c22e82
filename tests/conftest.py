"""Fixtures shared by all tests: worlds of ranks, and the check that they leave nothing behind."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import device_double
import harness
import leftovers
import pytest

# A shell that starts pytest in the background makes it ignore SIGINT, and all ranks would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The time limit of `make test` on two idle cores, in seconds; docs/testing.md explains how to keep it.
BUDGET_SECONDS = 600.0

_begin = time.monotonic()


def pytest_configure() -> None:
    """Runs before the first test, which may start threads."""
    leftovers.isolate()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests to ``make test-all``."""
    if harness.ALL:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warns if the tests have become too slow; not a failure, because other programs may have slowed them down."""
    seconds = time.monotonic() - _begin
    if not harness.ALL and seconds > BUDGET_SECONDS:
        terminalreporter.write_line(
            f"WARNING: {seconds:.0f} s, the budget is {BUDGET_SECONDS:.0f} s on two idle cores: see docs/testing.md",
            yellow=True,
        )


@contextlib.contextmanager
def _clean(worlds_run: bool = False) -> Iterator[None]:
    before = leftovers.shared_memory_entries()
    yield
    if left := leftovers.left_behind(before, worlds_run):
        pytest.fail(left, pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session if a rank has left something behind after the last test."""
    with _clean():
        yield


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Checks the same for one test, which must have its own worlds, from ``new_world``."""
    with _clean():
        yield


@pytest.fixture
def no_shared_memory_left() -> Iterator[None]:
    """Checks the same for one test beside shared worlds: only unused names in /dev/shm count."""
    with _clean(worlds_run=True):
        yield


@pytest.fixture(scope="session")
def compiled_double() -> None:
    """Compiles the fake device for tests whose ranks load it."""
    device_double.compile_double()


@pytest.fixture(scope="module")
def worlds() -> Iterator[harness.WorldPool]:
    """The module's worlds: ``worlds(n)`` is a process group of n ranks that all tests of a file share."""
    pool = harness.WorldPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def script_worlds() -> Iterator[harness.WorldPool]:
    """Worlds whose ranks run scripts, see ``scripts.run_script``."""
    pool = harness.WorldPool(initialize=False, environment={"FOG_CONFIRM": "0"})
    yield pool
    pool.close()


@pytest.fixture
def new_world() -> Iterator[Callable[..., harness.World]]:
    """Makes worlds for a single test, for tests that kill ranks or leave a group unusable.

    The last rank leaves as a script does; with ``finalizing=None``, for tests of how ranks end, all ranks do.
    """
    made: list[harness.World] = []

    def make(size: int, **options: Any) -> harness.World:
        made.append(harness.World(size, **({"finalizing": None if harness.ALL else 1} | options)))
        return made[-1]

    yield make
    harness.close_all(made)
