"""Fixtures shared by all tests: worlds of ranks, and the check that they leave nothing behind.

A run also fails if a test is skipped for a reason that is not in `SKIPS`, or a file takes more CPU than its share.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import device_double
import harness
import leftovers
import pytest

# A shell that starts pytest in the background makes it ignore SIGINT, and all ranks would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Seconds of CPU that the tests of a file may take in `make test`, with all processes that they start.
SHARE = 60.0
# Files that may take more, each with the reason.
MORE = {
    "test_joining.py": (120.0, "jobs of processes that come and go, some of them interpreters of their own"),
    "test_histories.py": (160.0, "thousands of histories, and mutants of the protocol that they must find"),
    "test_keep_going.py": (
        200.0,
        "jobs on emulated hosts, whose agents and ranks are interpreters of their own",
    ),
    "test_examples.py": (80.0, "scripts that train, as users start them"),
    "test_tcp.py": (80.0, "connections that are added, cut and paced, which takes seconds each"),
    "test_on_loss.py": (120.0, "about 90 worlds that lose ranks, of every kind"),
}

# Reasons of skips, as regular expressions, each with where the promise is tested instead. Any other skip fails the run.
SKIPS = {
    "needs a GPU": "make test-gpu",
    "holds streams of the fake device": "make test, on the fake device",
    r"ranks, \d+ GPUs": "make test-gpu with more GPUs, or with a newer NCCL",
    "(this torch|there is a GPU)": "the same code on torch without CUDA or without a GPU, as in CI",
    "torch 2.14 and later have": "make test-torch-newest",
    "make test-(mpi|frameworks|notebooks)": "that target, which installs what is missing",
    "Open MPI 4.1 starts under its own launcher only": "under that launcher",
    "the suite's driver is not at": "make conformance; the driver is not part of the repository",
    "mkdocs is not installed": "make docs",
    "the number of the system call is that of x86_64": "on x86_64, as in CI",
    "not a checkout of git": "in one, as in CI",
}
if os.geteuid() != 0:
    SKIPS["root|may not make a mount namespace"] = "in CI, which is root"

_ROOT = Path(__file__).parent.parent
# The seconds of CPU up to the end of the last test.
_before = 0.0
# Of each file: seconds of CPU, and seconds.
_spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
_forbidden: list[str] = []


def pytest_configure() -> None:
    """Runs before the first test, which may start threads."""
    leftovers.isolate()
    # torch looks up the names of addresses; a question that the name server loses would cost five seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    (_ROOT / "build").mkdir(exist_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests to `make test-all`, and those of style to `make lint`."""
    left_out = {"long": harness.ALL, "style": "style" in config.option.markexpr}
    marks = [mark for mark, is_asked_for in left_out.items() if not is_asked_for]
    away = [item for item in items if any(item.get_closest_marker(mark) for mark in marks)]
    config.hook.pytest_deselected(items=away)
    items[:] = [item for item in items if item not in set(away)]


def pytest_runtestloop() -> None:
    global _before
    _before = harness.cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Runs a test that is marked `alone` while no other process of this run has a test."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with (
        (_ROOT / "build" / "tests.gate").open("w") as gate,
        (_ROOT / "build" / "tests.turn").open("w") as turn,
    ):
        fcntl.flock(gate, fcntl.LOCK_EX)  # so that others queue behind one that waits to be alone
        if item.get_closest_marker("alone"):
            fcntl.flock(turn, fcntl.LOCK_EX)
        else:
            fcntl.flock(turn, fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the CPU since the last test, worlds that ended with this one included, to the report of its end."""
    global _before
    report = yield
    if call.when == "teardown":
        now = harness.cpu_seconds()
        report.user_properties.append(("cpu", now - _before))
        _before = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    spent = _spent[report.nodeid.partition("::")[0]]
    spent[0] += dict(report.user_properties).get("cpu", 0.0)
    spent[1] += report.duration
    _check_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _check_skip(report)


def _check_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(re.search(allowed, reason) for allowed in SKIPS):
            _forbidden.append(f"{report.nodeid} is skipped: {reason}")


def _share(file: str) -> float:
    return MORE.get(Path(file).name, (SHARE, ""))[0]


def _too_much() -> list[str]:
    if "TEST_FILE_SHARES" not in os.environ:
        return []
    return [
        f"{file} took {cpu:.0f} s of CPU, its share is {_share(file):.0f}"
        for file, (cpu, _) in sorted(_spent.items())
        if cpu > _share(file)
    ]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == 0 and (_forbidden or _too_much()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if hasattr(session.config, "workerinput"):  # pytest-xdist ends it without destructors
        harness.write_counters()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what fails the run here, and the dearest files; build/test-seconds.md has all of them."""
    rows = ["| file | lines | seconds of CPU | seconds |", "|---|---|---|---|"]
    for file, (cpu, wall) in sorted(_spent.items(), key=lambda spent: -spent[1][0]):
        lines = len((_ROOT / file).read_text().splitlines())
        rows.append(f"| `{Path(file).name}` | {lines} | {cpu:.0f} | {wall:.0f} |")
    if _spent and not terminalreporter.config.option.markexpr:
        (_ROOT / "build" / "test-seconds.md").write_text("\n".join([*rows, ""]))
        terminalreporter.section("the dearest files")
        terminalreporter.write_line("\n".join(rows[:17]))
    for line in [*_forbidden, *_too_much()]:
        terminalreporter.write_line(f"FAILED {line}", red=True)


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
def worlds(request: pytest.FixtureRequest) -> Iterator[harness.WorldPool]:
    """The module's worlds: ``worlds(n)`` is a process group of n ranks that all tests of a file share."""
    pool = getattr(request.module, "WORLDS", harness.WorldPool)()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def world_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., harness.World]]:
    """The module's worlds in which ranks reach each other in a given way: ``world_of(way, n)``."""
    from window_interfaces import WorldsByWay

    made = WorldsByWay(tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def script_worlds() -> Iterator[harness.WorldPool]:
    """Worlds whose ranks run scripts, see ``scripts.run_script``."""
    pool = harness.WorldPool(initialize=False, environment={"_FOG_CONFIRM": "0"})
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
