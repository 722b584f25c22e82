"""The agent of a host under `fog run`: it starts the ranks of its host, and lives on when one of them dies.

`python -m fog_cli.programs.agent`. Standard input is the connection to `fog run`: first a line of JSON, the `Task`, then
lines with signals for the ranks, and with those to start again. Its end means that `fog run` is gone: the ranks are
ended, or if they are to go on without it, this agent starts lost ones again by itself, and ends with its ranks. Standard
output has the output of the ranks, and lines with the task's token, which tell `fog run` what happened.

The agent of the first host holds the job's Store, so the Store outlives every rank. If the job goes on after the loss of a
host, each agent serves a Store, and that of another host takes its place (`fog_pg._standby`).

Two processes watch each other. The first one is the guard. It adopts whatever the ranks leave behind, and ends it when
the agent proper, its child, has ended for any reason. If the guard is killed, the agent gets SIGTERM and ends the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fog_cli import processes
from fog_cli.programs.rank import die_with_parent, write_whole

# The seconds that ranks have to end after a signal, as under torchrun.
_STOP_TIMEOUT = 30.0
# What a member of a job has open, see `fog_pg._joining.note_member`.
_MEMBER = "fog_member"
# The seconds in which the last messages to `fog run` must be written.
_TELL_TIMEOUT = 10.0
# The seconds in which `fog run` decides about a rank that has ended; then it is gone, with a host that says no more.
_DECIDE_TIMEOUT = 30.0
# The seconds that a host may take to accept a connection.
_REACH_TIMEOUT = 5.0
# The seconds that other hosts may take to start, and after which those that are missing are named.
_START_TIMEOUT, _NAME_AFTER = 900.0, 8.0


@dataclass(frozen=True)
class Task:
    """What an agent is to do.

    Attributes:
        token: The first word of the lines that are for `fog run`.
        command: The program `fog_cli.programs.rank` with the command of a rank.
        environment: The variables that the ranks have in common, see `fog_cli.launchers.of_host`.
        folder: Their working directory.
        size: The number of ranks of the job.
        first: The first rank of this host.
        count: The number of ranks of this host.
        port: That of the Store; 0 for any free one.
        host: The number of this host.
        serves: Whether this agent serves a Store.
        stays: Whether it does so until `fog run` says that the other hosts have ended.
        max_restarts: How often a rank that did not end well is started again, as long as `fog run` does not say otherwise.
        goes_on: Whether the ranks go on if `fog run` is gone without a word.
    """

    token: str
    command: list[str]
    environment: dict[str, str]
    folder: str
    size: int
    first: int
    count: int
    port: int = 0
    host: int = 0
    serves: bool = True
    stays: bool = False
    max_restarts: int = 0
    goes_on: bool = False


@dataclass
class _Rank:
    number: int
    pid: int
    begun: float
    restarts: int


class Agent:
    """Starts ranks, waits for their ends, and tells `fog run` about them."""

    def __init__(self, task: Task, connection: int) -> None:
        self._task = task
        self._connection = connection
        self._unread = b""
        self._living: dict[int, _Rank] = {}  # by process ID
        # Ranks to start: how often they were started before, and whether they join others.
        self._due = {rank: (0, False) for rank in range(task.first, task.first + task.count)}
        # Ranks that have ended and may be started again: their restarts, and until when `fog run` must decide.
        self._undecided: dict[int, tuple[int, float]] = {}
        self._is_alone = False  # `fog run` is gone
        self._runs = False  # the job ran already when this agent started
        self._left: list[
            tuple[float, set[tuple[int, int]]]
        ] = []  # processes of lost ranks, and when they are killed
        self._stop_at: float | None = None  # when ranks that were told to end are killed
        self._stays = task.stays
        self._port = task.port
        self._stores: list[str] = []  # the addresses of the job's Stores; ranks start when they are known
        self._store: Any = None
        self._serving: threading.Thread | None = None
        self._failure: str | None = None
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A thread of its own writes, because the reader of the output may have stopped, as a terminal after Ctrl-S.
        self._teller = threading.Thread(target=self._write_messages, daemon=True)
        self._teller.start()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(connection, selectors.EVENT_READ)
        for number in (*processes.SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda _number, _frame: None)  # `_woken` has the number

    def run(self) -> int:
        """Runs until no rank lives and nobody needs the Store; returns the exit status of this process."""
        self._begin()
        self._keep_times()
        while self._living or self._due or self._undecided or self._left or self._is_needed():
            self._wait()
            self._reap()
            self._keep_times()
        self._tell(event="done", failure=self._failure)
        self._messages.put(None)
        self._teller.join(_TELL_TIMEOUT)
        return 1 if self._failure else 0

    def _begin(self) -> None:
        """Serves a new Store, if this agent does so; one before it goes with what its ranks have written."""
        is_alone = self._task.size == self._task.count
        if self._task.serves:
            if self._serving is not None:
                self._serving.join()
            self._store = None
            listener = _listen(self._port, only_here=is_alone)
            self._port = listener.getsockname()[1]
            # It takes seconds to import torch; the ranks do the same meanwhile, and connect when the Store is there.
            self._serving = threading.Thread(target=self._serve, args=(listener,), daemon=True)
            self._serving.start()
        self._stores = [f"127.0.0.1:{self._port}"] if is_alone else []
        self._tell(event="begun", port=self._port)

    def _is_needed(self) -> bool:
        """Whether other hosts use the Store."""
        return self._stays and self._stop_at is None and not self._failure

    def _serve(self, listener: socket.socket) -> None:
        try:
            from torch.distributed import TCPStore

            self._store = TCPStore(
                "127.0.0.1",
                self._port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except Exception as error:
            self._failure = f"the Store cannot be served: {type(error).__name__}: {error}"
            os.kill(os.getpid(), signal.SIGTERM)  # wakes the main thread, which ends the ranks

    def _find_job(self, stores: list[str]) -> None:
        """Waits until the Stores of all hosts are there, or one is that of a job that runs already: the ranks then join."""
        deadline = time.monotonic() + _START_TIMEOUT
        named = time.monotonic() + _NAME_AFTER
        if self._serving is not None:  # it imports torch, and two threads must not do so at the same time
            self._serving.join()
        from fog_pg._standby import is_of_a_job

        missing, runs = set(stores), False
        while missing and not runs:
            for address in sorted(missing):
                if (is_taken := is_of_a_job(address)) is not None:
                    missing.discard(address)
                    runs = runs or is_taken
            if missing and time.monotonic() >= named:
                self._tell(event="waits", stores=sorted(missing))
                named = deadline
            if missing and time.monotonic() >= deadline:
                self._failure = f"the Stores at {', '.join(sorted(missing))} cannot be reached"
                os.kill(os.getpid(), signal.SIGTERM)
                return
            time.sleep(processes.INTERVAL)
        self._runs, self._stores = runs, stores
        os.write(self._waker, b"\0")

    def _reach(self, stores: list[str]) -> None:
        """Lets the ranks start if this host reaches all Stores: torch would try that for half an hour."""
        for address in stores:
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), _REACH_TIMEOUT).close()
            except OSError as error:
                self._failure = f"the Store at {address} cannot be reached: {error}"
                os.kill(os.getpid(), signal.SIGTERM)
                return
        self._stores = stores
        os.write(self._waker, b"\0")

    def _start(self, rank: int, restarts: int, joins: bool) -> None:
        joins = joins or self._runs
        own: dict[str, object] = {"RANK": rank, "ROLE_RANK": rank, "LOCAL_RANK": rank - self._task.first}
        # A rank that joins begins at the Store of its own host, which is there.
        address, _, port = self._stores[self._task.host if joins else 0].rpartition(":")
        own |= {"MASTER_ADDR": address.strip("[]"), "MASTER_PORT": port, "FOG_JOIN": int(joins)}
        if len(self._stores) > 1:
            own["FOG_STORES"] = ",".join(self._stores)
        environment = self._task.environment | {name: str(value) for name, value in own.items()}
        program, *words = self._task.command
        pid = os.posix_spawn(
            program,
            [program, *words],
            environment,
            file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
            setsid=True,  # so that its processes can be told from those of other ranks
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
        )
        self._living[pid] = _Rank(rank, pid, time.monotonic(), restarts)

    def _wait(self) -> None:
        """Waits for a signal, a line of `fog run`, or the next time to keep."""
        times = [at for at, _ in self._left] + [at for _, at in self._undecided.values()]
        if (
            self._due and self._stores
        ):  # they wait for the end of what is left of those before, which nothing tells
            times.append(time.monotonic() + processes.INTERVAL)
        if self._stop_at is not None and self._living:
            times.append(self._stop_at)
        timeout = max(min(times) - time.monotonic(), 0.0) if times else None
        for key, _ in self._selector.select(timeout):
            if key.fd == self._connection:
                self._read_connection()
            else:
                for number in os.read(self._woken, 1 << 12):
                    if number in processes.SIGNALS:
                        self._stop(number)

    def _read_connection(self) -> None:
        data = os.read(self._connection, 1 << 16)
        if not data:
            self._selector.unregister(self._connection)
            if self._task.goes_on and self._stores:
                self._go_on_alone()
            elif self._stop_at is None:
                self._stop(signal.SIGTERM)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            if "signal" in told:
                self._stop(int(told["signal"]))
            elif "members" in told:
                ranks = [rank.number for rank in self._living.values() if _is_member(rank.pid)]
                self._tell(event="members", question=told["members"], ranks=ranks)
            elif "stores" in told:
                begin = self._find_job if told["is_only"] else self._reach
                threading.Thread(target=begin, args=(told["stores"],), daemon=True).start()
            elif "start" in told:
                if self._undecided.pop(told["start"], None) is not None:
                    self._plan(told["start"], told["restarts"], joins=True)
            elif "again" in told:
                self._start_all(told["again"])
            elif "leave" in told:
                self._undecided.pop(told["leave"], None)
            else:  # the other hosts have ended
                self._stays = False

    def _go_on_alone(self) -> None:
        """Decides without `fog run`: a rank that has ended joins the others, who may be on any host."""
        self._is_alone, self._stays = True, False
        for rank, (restarts, _) in self._undecided.items():
            if restarts < self._task.max_restarts:
                self._plan(rank, restarts + 1, joins=True)
        self._undecided.clear()

    def _plan(self, rank: int, restarts: int, *, joins: bool) -> None:
        if self._stop_at is None:
            self._due[rank] = restarts, joins

    def _start_all(self, restarts: Mapping[str, int]) -> None:
        """Ends the ranks that live, and starts the first ones again."""
        for rank in self._living.values():
            self._end_rest(rank)
        self._living.clear()
        self._undecided.clear()
        self._due.clear()
        self._begin()
        for number in range(self._task.first, self._task.first + self._task.count):
            self._plan(number, restarts[str(number)], joins=False)

    def _end_rest(self, rank: _Rank) -> None:
        """Ends what lives of a rank's session."""
        if left := processes.of_session(rank.pid):
            for process in left:
                processes.send(process, signal.SIGTERM)
            self._left.append((time.monotonic() + processes.GRACE, left))

    def _stop(self, number: int) -> None:
        """Sends a signal to all ranks; those that still live after a time are killed."""
        self._due.clear()
        self._undecided.clear()
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _STOP_TIMEOUT
        for pid in self._living:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)  # a stopped process takes it only then
        if number == signal.SIGKILL:
            self._stop_at = time.monotonic()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if (rank := self._living.pop(pid, None)) is not None:
                    self._on_end(rank, os.waitstatus_to_exitcode(status))

    def _on_end(self, rank: _Rank, status: int) -> None:
        if status != 0:
            # A rank that was killed could not end its own processes. One that ended well may leave some at work, as
            # a logger that sends its last lines; the guard ends these at the end of the job.
            self._end_rest(rank)
            if self._task.max_restarts and self._stop_at is None:
                self._undecided[rank.number] = rank.restarts, time.monotonic() + _DECIDE_TIMEOUT
        self._tell(
            event="ended",
            rank=rank.number,
            pid=rank.pid,
            status=status,
            seconds=time.monotonic() - rank.begun,
            restarts=rank.restarts,
        )

    def _keep_times(self) -> None:
        now = time.monotonic()
        if self._undecided and (self._is_alone or min(at for _, at in self._undecided.values()) <= now):
            self._go_on_alone()
        for at, left in list(self._left):
            still = processes.living(left)
            if not still or at <= now:
                processes.kill_with_descendants(still)
                self._left.remove((at, left))
        if self._stores and not self._left:  # nothing is left of the process before when a rank starts again
            for rank in list(self._due):
                self._start(rank, *self._due.pop(rank))
        if self._stop_at is not None and self._stop_at <= now:
            for pid in self._living:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            self._stop_at = now + processes.GRACE

    def _tell(self, **values: object) -> None:
        self._messages.put(f"{self._task.token} {json.dumps(values)}\n".encode())

    def _write_messages(self) -> None:
        while (message := self._messages.get()) is not None:
            write_whole(1, message)


def _is_member(leader: int) -> bool:
    """Whether a process of a rank's session has the mark of a member; the rank may be a child of its command."""
    for pid, _ in processes.of_session(leader):
        with contextlib.suppress(OSError):  # it has just ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if _MEMBER in os.readlink(entry.path):
                        return True
    return False


def _listen(port: int, *, only_here: bool) -> socket.socket:
    """Returns the socket of the Store. If all ranks are on this host, only this host reaches it."""
    try:
        if only_here:
            return socket.create_server(("127.0.0.1", port), backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        other = "; another job may have the same MASTER_PORT" if port else ""
        raise OSError(f"port {port} of the job's Store: {os.strerror(error.errno or 0)}{other}") from error


def _read_line(descriptor: int) -> bytes:
    """Reads up to the end of a line, and nothing of what follows."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line


def _guard(agent: int, scratch: str | None) -> NoReturn:
    """Waits for the end of the agent, and then ends all processes below this one, and removes a folder."""

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(agent, number)

    for number in processes.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    while True:
        pid, found = os.waitpid(-1, 0)  # also processes that it has adopted
        if pid == agent:
            status = os.waitstatus_to_exitcode(found)
            break
    for number in processes.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    processes.end_descendants()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(status if status >= 0 else 128 - status)


def main() -> NoReturn:
    """Runs the guard and the agent.

    With the folder of a notebook as an argument, which goes with the job, they are no children of the notebook's kernel: it
    kills its children when it ends.
    """
    scratch = sys.argv[1] if len(sys.argv) > 1 else None
    if scratch is not None and os.fork():
        os._exit(0)
    processes.adopt_orphans()
    agent = os.fork()
    if agent:
        _guard(agent, scratch)
    die_with_parent()
    status = 1
    try:
        values: Mapping[str, Any] = json.loads(_read_line(0) or b"null") or sys.exit(1)
        task = Task(**values)
        os.chdir(task.folder)
        status = Agent(task, 0).run()
    except OSError as error:
        print(f"fog run: the agent of this host: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)  # torch's threads may run


if __name__ == "__main__":
    main()
