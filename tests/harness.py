"""Worlds of rank processes for tests.

A ``World`` is a process group of real processes on this host. Its ranks are forked from a server process that has
imported torch already, so a world starts in a fraction of a second. A test file keeps its worlds and sends functions to
them. Every wait has a deadline: a rank that does not answer in time is asked for its stack, killed with the rest of its
world, and reported.

Ranks leave as a script does: they destroy the process group and finalize the interpreter, so a crash at the end fails
the test that owns the world. In a world that tests share, only one rank does all of this, and the others a part of it
(see ``World``), except in ``make test-all``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import leftovers
import pytest
import torch
import torch.distributed as dist

# Whether the long tests run too, with all their samples; ``make test-all`` sets it. See docs/testing.md.
ALL = os.environ.get("FOG_TEST_ALL", "") == "1"

# Deadlines in seconds. A world starts and stops in about a second; the rest is for a busy machine.
START_TIMEOUT = 60.0
STOP_TIMEOUT = 30.0
RUN_TIMEOUT = 60.0
# After a rank has failed, the others often wait for it, so there is no need to wait for the whole deadline.
GRACE_AFTER_FAILURE = 5.0

# These libraries start thread pools at import or at the first operation, which would be threads of the fork server.
# Inductor's pool has processes, which would outlive a killed rank.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
_LOG_TAIL = 6000

# The requests that end a rank, in place of a call.
_LEAVE, _LEAVE_AS_SCRIPTS_DO = b"leave", b""

# The module that the fork server imports before it forks ranks.
_PRELOAD = "fork_server"

context = multiprocessing.get_context("forkserver")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one call on one rank.

    Attributes:
        rank: Rank in the world.
        state: ``"returned"``, ``"raised"``, ``"died"`` or ``"stuck"`` (killed at the deadline).
        value: The function's return value.
        error: The exception; a RuntimeError with the same text if the exception cannot be pickled.
        details: Traceback, exit status or stacks, and the output of the rank during the call.
        seconds: The time that the function ran in the rank.
    """

    rank: int
    state: str
    value: Any = None
    error: BaseException | None = None
    details: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        text = f"== rank {self.rank}: {self.state} after {self.seconds:.2f} s"
        return f"{text}\n{self.details.rstrip()}" if self.details.strip() else text


class RankFailures(AssertionError):
    """Raised if ranks did not all return; the message shows every rank."""

    def __init__(self, what: str, outcomes: Sequence[Outcome]) -> None:
        failed = [o.rank for o in outcomes if o.state != "returned"]
        lines = [f"{what}: {len(failed)} of {len(outcomes)} ranks failed (ranks {failed})"]
        super().__init__("\n".join(lines + [str(o) for o in outcomes]))
        self.outcomes = list(outcomes)


@dataclasses.dataclass(frozen=True)
class _Settings:
    rank: int
    size: int
    backend: str
    timeout: float
    environment: dict[str, str]
    log: str
    initialize: bool


def sizes(default: Sequence[int], more: Sequence[int]) -> list[Any]:
    """Returns numbers of ranks to parametrize a test by; ``make test-all`` uses `more` too."""
    return [*default, *(pytest.param(size, marks=pytest.mark.long) for size in more)]


@contextlib.contextmanager
def case(**values: Any) -> Iterator[None]:
    """Names the case of a loop in an AssertionError, for tests that loop over many cases."""
    try:
        yield
    except AssertionError as error:
        named = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise AssertionError(f"with {named}: {error}") from error


class _Body:
    """The function that a test of `on_ranks` runs on a rank, which finds it by the name of the test that wraps it."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__

    def __call__(self, *arguments: Any) -> None:
        getattr(importlib.import_module(self.__module__), self.__qualname__).__wrapped__(*arguments)


def on_ranks(
    size: int | list[int], **cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that each rank of a shared world calls, with its parameters and fixtures.

    Args:
        size: Number of ranks, or several numbers; the function has to ask for it itself.
        **cases: Values of the function's parameters; each value is a test, as with ``pytest.mark.parametrize``.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def test(worlds: WorldPool, **given: Any) -> None:
            arguments = [given[name] for name in names]
            worlds(given.get("size", size)).run(_Body(function), *arguments)

        sizes = {"size": size} if isinstance(size, list) else {}
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ["worlds", *sizes, *names]
        ]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        for name, values in {**cases, **sizes}.items():
            test = pytest.mark.parametrize(name, list(values))(test)
        return test

    return decorate


def init_process_group(timeout: float, backend: str = "fog") -> None:
    """Joins the world in a rank process, as a script under torchrun does.

    Args:
        timeout: The group's timeout in seconds.
        backend: Name of the c10d backend.
    """
    if backend == "fog":
        import fog_pg  # noqa: F401  registers "fog" also where the entry point is not installed

    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def error_of(call: Callable[[], object]) -> str:
    """Returns the text of the DistBackendError that the call raises, or an empty string."""
    try:
        call()
    except dist.DistBackendError as error:
        return str(error)
    return ""


def exception_of(work: dist.Work) -> Any:
    """Returns the exception of a completed Work, or None. Torch 2.11 can only show whether there is one."""
    try:
        return work.exception()
    except TypeError as error:
        if "exception_ptr" not in str(error):
            raise
        return None if work.is_success() else error


def _begin(log: str, environment: Mapping[str, str]) -> None:
    """Makes a process that was forked from the server a rank: its session, its output, its environment."""
    # Each rank has its own session: Ctrl-C at the terminal reaches pytest only, and descendants can be found and
    # killed.
    os.setsid()
    threading.Thread(target=_die_with_pytest, daemon=True).start()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(environment)
    torch.set_num_threads(1)
    # From Python 3.13 on, multiprocessing drops the exit functions of the process that it forks. Without this one torch's
    # finalizers run when its modules are gone, with a traceback each.
    atexit.register(weakref.finalize._exitfunc)


def fork(
    function: Callable[..., None], *arguments: Any, log: Path, environment: Mapping[str, str]
) -> multiprocessing.process.BaseProcess:
    """Forks a process, with its output in a file, that calls a function and ends with status 1 if that raises.

    It is a rank of no `World`: the test decides which ranks there are, and when they start.
    """
    start_fork_server()
    target = (str(log), _ONE_THREAD | dict(environment), function, arguments)
    process = context.Process(target=_call_and_exit, args=target)
    process.start()
    leftovers.watch(process.pid)
    return process


def _call_and_exit(
    log: str, environment: Mapping[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    _begin(log, environment)
    status = 0
    try:
        function(*arguments)
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        traceback.print_exc()
    end(status)


def end(status: int) -> NoReturn:
    """Ends a process as a script does, but for the finalization of Python and the destructors of C++."""
    atexit._run_exitfuncs()  # these include the end of the backend
    sys.stdout.flush()
    sys.stderr.flush()
    write_counters()
    os._exit(status)


def write_counters() -> None:
    """Writes the counters of `make coverage` in a process that ends without destructors."""
    library = ctypes.CDLL(getattr(sys.modules.get("fog_pg._C"), "__file__", None))
    if hasattr(library, "__gcov_dump"):
        library.__gcov_dump()


def _rank_main(settings: _Settings, connection: Connection) -> None:
    _begin(settings.log, settings.environment)

    def start() -> None:
        if settings.initialize:
            init_process_group(settings.timeout, settings.backend)

    _answer(connection, settings.rank, start, ())
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:  # pytest has ended, or has closed the connection
            os._exit(1)
        if request in (_LEAVE, _LEAVE_AS_SCRIPTS_DO):
            break
        _answer(connection, settings.rank, _unpickle_and_call, (request,))
    if dist.is_initialized():
        dist.destroy_process_group()
    if request == _LEAVE:
        end(0)
    sys.stdout.flush()
    # multiprocessing ends its processes with os._exit. Scripts end with the finalization of Python and the destructors
    # of C++ instead; doing the same shows a backend that crashes there.
    ctypes.pythonapi.Py_Exit(0)


def _die_with_pytest() -> None:
    """Kills this rank, whatever it is doing, after pytest was killed."""
    pytest_process = multiprocessing.parent_process()
    assert pytest_process is not None
    pytest_process.join()
    os.killpg(0, signal.SIGKILL)


def _unpickle_and_call(request: bytes) -> Any:
    function, arguments = pickle.loads(request)
    return function(*arguments)


def _answer(
    connection: Connection, rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    begin = time.monotonic()
    try:
        value = function(*arguments)
        outcome = Outcome(rank, "returned", value=value, seconds=time.monotonic() - begin)
        # Plain pickle, because torch makes Connection.send move tensors to shared memory.
        answer = pickle.dumps(outcome)
    except BaseException as error:
        outcome = Outcome(
            rank,
            "raised",
            error=_picklable(error),
            details="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            seconds=time.monotonic() - begin,
        )
        answer = pickle.dumps(outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(answer)


def _picklable(error: BaseException) -> BaseException:
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(copy, type(error)) else RuntimeError(f"{type(error).__name__}: {error}")


class World:
    """A process group of ``size`` rank processes on this host.

    Args:
        size: Number of ranks.
        backend: The c10d backend.
        timeout: The group's timeout in seconds.
        environment: More environment variables for the ranks.
        initialize: False leaves ``init_process_group`` to the functions that the test sends.
        finalizing: Number of ranks, the last ones, that leave as scripts do; by default all. The others only call the
            functions that are registered for the exit, because the finalization of Python and the destructors of C++
            take half a second per rank.

    Raises:
        RankFailures: A rank did not start.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str = "fog",
        timeout: float = 30.0,
        environment: dict[str, str] | None = None,
        initialize: bool = True,
        finalizing: int | None = None,
    ) -> None:
        start_fork_server()
        self.size = size
        self.finalizing = size if finalizing is None else finalizing
        self.broken = False
        self._killed: set[int] = set()
        self._directory = Path(tempfile.mkdtemp(prefix="fog-test-"))
        # The store outlives every rank, as under torchrun.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._log_offsets = [0] * size
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        try:
            for rank in range(size):
                self._start_rank(rank, backend, timeout, environment or {}, initialize)
            outcomes = self._collect(START_TIMEOUT, GRACE_AFTER_FAILURE)
            if any(o.state != "returned" for o in outcomes):
                raise RankFailures(f"start of a world of {size} ranks", outcomes)
        except BaseException:
            self.abandon()
            raise

    def _start_rank(
        self, rank: int, backend: str, timeout: float, environment: dict[str, str], initialize: bool
    ) -> None:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(self.size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            # As under torchrun, the launcher owns the store, and rank 0 is only a client.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            # With this, ranks that disagree raise in the same call, whether they send or receive.
            "_FOG_CONFIRM": "1",
            **_ONE_THREAD,
            **environment,
        }
        settings = _Settings(rank, self.size, backend, timeout, variables, str(self._log(rank)), initialize)
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(settings, theirs), name=f"rank-{rank}")
        process.start()
        theirs.close()
        leftovers.watch(process.pid)
        self._connections.append(ours)
        self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Calls ``function(*arguments)`` on every rank.

        Args:
            function: A function of a module, so that ranks can import it.
            arguments: Picklable arguments, the same for all ranks.
            timeout: Seconds until ranks that have not answered are killed.

        Returns:
            The return value of each rank, in the order of ranks.

        Raises:
            RankFailures: A rank raised, died or did not answer. Then the world is killed, because its ranks may be
                waiting for each other, or have messages of the failed operation in flight.
        """
        self._send(function, [arguments] * self.size)
        outcomes = self._collect(timeout, GRACE_AFTER_FAILURE)
        if any(o.state != "returned" for o in outcomes):
            self.abandon()
            raise RankFailures(f"{function.__module__}.{function.__qualname__}", outcomes)
        return [o.value for o in outcomes]

    def run_raw(
        self, function: Callable[..., Any], *arguments: Any, timeout: float = RUN_TIMEOUT
    ) -> list[Outcome]:
        """Calls ``function(*arguments)`` on every living rank, for tests that expect failures.

        Returns:
            One outcome for each rank that was alive, in the order of ranks. The world continues after ranks that raise
            or die; if a rank is stuck, the whole world is killed.
        """
        self._send(function, [arguments] * self.size)
        return self._collect(timeout, None)

    def run_by_rank(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        timeout: float = RUN_TIMEOUT,
    ) -> list[Outcome]:
        """Does the same as ``run_raw``, with different arguments for each rank."""
        self._send(function, arguments)
        return self._collect(timeout, None)

    def kill(self, rank: int) -> None:
        """Kills a rank with SIGKILL and waits until it is gone."""
        self._killed.add(rank)
        self._kill_process(rank)

    def living(self) -> list[int]:
        """Returns the ranks whose processes run."""
        return [r for r in range(len(self._processes)) if self._processes[r].is_alive()]

    def pid(self, rank: int) -> int:
        """Returns the process id of a rank."""
        return self._processes[rank].pid

    def close(self) -> None:
        """Ends the world: ranks destroy their process group and exit as scripts do.

        Raises:
            RankFailures: A rank that the test did not kill hung or crashed at its end.
        """
        if self.broken:
            return
        waiting = self.living()
        for rank in waiting:
            with contextlib.suppress(OSError):  # the rank may have died by itself; its exit status tells
                finalizes = rank >= self.size - self.finalizing
                self._connections[rank].send_bytes(_LEAVE_AS_SCRIPTS_DO if finalizes else _LEAVE)
        deadline = time.monotonic() + STOP_TIMEOUT
        outcomes = []
        for rank in waiting:
            self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        stuck = [r for r in waiting if self._processes[r].is_alive()]
        stacks = self._dump_stacks(stuck)
        for rank in range(self.size):
            status = self._processes[rank].exitcode
            if rank in stuck:
                outcomes.append(Outcome(rank, "stuck", details=stacks[rank], seconds=STOP_TIMEOUT))
            elif status != 0 and rank not in self._killed:
                outcomes.append(Outcome(rank, "died", details=self._post_mortem(rank)))
            else:
                outcomes.append(Outcome(rank, "returned"))
        self.abandon()
        if any(o.state != "returned" for o in outcomes):
            raise RankFailures(f"end of a world of {self.size} ranks", outcomes)

    def abandon(self) -> None:
        """Kills all ranks that are left and removes the files of the world."""
        self.broken = True
        for rank in range(len(self._processes)):
            self._kill_process(rank)
            self._connections[rank].close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"

    def _send(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
        if self.broken:
            raise RuntimeError("this world was killed after an earlier failure; take a new one")
        requests = [pickle.dumps((function, each)) for each in arguments]
        for rank in range(self.size):
            log = self._log(rank)
            self._log_offsets[rank] = log.stat().st_size if log.exists() else 0
        for rank in self.living():
            # the rank may have died by itself; _collect sees the end of its pipe
            with contextlib.suppress(OSError):
                self._connections[rank].send_bytes(requests[rank])

    def _collect(self, timeout: float, grace: float | None) -> list[Outcome]:
        waiting = {self._connections[r]: r for r in range(self.size) if r not in self._killed}
        outcomes: dict[int, Outcome] = {}
        begin = time.monotonic()
        deadline = begin + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcome = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._processes[rank].join(STOP_TIMEOUT)
                    seconds = time.monotonic() - begin
                    outcome = Outcome(rank, "died", details=self._post_mortem(rank), seconds=seconds)
                    self._killed.add(rank)
                if outcome.state == "raised":
                    outcome = dataclasses.replace(outcome, details=outcome.details + self._printed(rank))
                if outcome.state != "returned" and grace is not None:
                    deadline = min(deadline, time.monotonic() + grace)
                outcomes[rank] = outcome
        if waiting:
            stacks = self._dump_stacks(sorted(waiting.values()))
            for rank in waiting.values():
                seconds = time.monotonic() - begin
                outcomes[rank] = Outcome(rank, "stuck", details=stacks[rank], seconds=seconds)
            self.abandon()
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _kill_process(self, rank: int) -> None:
        process = self._processes[rank]
        if process.is_alive():  # otherwise another process may have its number by now
            with contextlib.suppress(ProcessLookupError):  # the rank may not lead its process group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.join(STOP_TIMEOUT)

    def _dump_stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)  # faulthandler writes within this time, unless the process is stopped
        return {rank: _thread_states(self._processes[rank].pid) + self._printed(rank) for rank in ranks}

    def _post_mortem(self, rank: int) -> str:
        status = self._processes[rank].exitcode
        cause = f"status {status}"
        if status is not None and status < 0:
            cause = f"signal {signal.Signals(-status).name}"
        return f"process ended with {cause}\n{self._printed(rank)}"

    def _printed(self, rank: int) -> str:
        log = self._log(rank)
        if not log.exists():
            return ""
        with log.open("rb") as file:
            file.seek(self._log_offsets[rank])
            text = file.read().decode(errors="replace")
        return f"-- printed by rank {rank}:\n{text[-_LOG_TAIL:]}" if text.strip() else ""


def start_fork_server() -> None:
    """Starts the fork server unless it runs. Only its environment names the folder of the preloaded module."""
    saved = dict(os.environ)
    path = [str(Path(__file__).parent), saved.get("PYTHONPATH", "")]
    os.environ.update(_ONE_THREAD, PYTHONPATH=os.pathsep.join(filter(None, path)))
    try:
        context.set_forkserver_preload([_PRELOAD])
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(saved)


def cpu_seconds() -> float:
    """Returns the CPU that this process and the fork server have used, with all of their processes that have ended."""
    own = sum(os.times()[:4])
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    if server is None:
        return own
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return own + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class WorldPool:
    """Worlds by size, started at their first use and kept; a broken world is replaced by a new one.

    Args:
        options: Options of each `World`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._worlds: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """Returns the world of ``size`` ranks."""
        world = self._worlds.get(size)
        if world is None or world.broken:
            world = self._worlds[size] = World(size, **self._options)
        return world

    def close(self) -> None:
        """Ends all worlds; raises RankFailures if one did not end well.

        One rank of the largest world leaves as a script does; in ``make test-all`` all ranks of all worlds do.
        """
        if not ALL:
            for size, world in self._worlds.items():
                world.finalizing = int(size == max(self._worlds))
        close_all(list(self._worlds.values()))


def close_all(worlds: Sequence[World]) -> None:
    """Closes every world, and only then raises the first failure."""
    failures = []
    for world in worlds:
        try:
            world.close()
        except RankFailures as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def _thread_states(pid: int) -> str:
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*/stat")):
        try:
            name, _, rest = task.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        lines.append(f"thread {name}: state {fields[0]}, {seconds:.1f} s of CPU")
    return "\n".join(lines) + "\n"
