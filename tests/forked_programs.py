"""Runs Python programs, and those that they start, in forked processes, so that no interpreter starts and imports torch.

A process of the fork server of `harness` becomes `python ...`, and so does a fork of it wherever it would start an
interpreter: an agent, a rank, a program of `fog doctor`. The fork has the descriptors, signals and variables that an exec
leaves. Other programs are executed as usual. ssh is a fork in the network namespace of an emulated host.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import harness
import torch
import torch.distributed as dist
from hosts import move_to_host
from scripts import MARK, Job
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

# The variable with the network namespaces of emulated hosts, by the names for ssh.
HOSTS = "HOSTS_OF_A_TEST"
# The value in <sys/prctl.h>.
_PR_SET_NAME = 15
_execute, _spawn, _TCPStore = os.execvp, os.posix_spawn, dist.TCPStore
# The programs that fork others while they serve a Store.
_HOLDERS = ("agent", "fog_cli")
# Held while this process forks, and while it connects to a Store.
_no_fork = threading.Lock()


class ForkedJob(Job):
    """As `Job`; the words are those of a Python program, whose interpreter does not start.

    Args:
        first: A function of a module that the process calls first.
        words, log, environment: As of `Job`.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        first: Callable[[], object] | None = None,
    ) -> None:
        self._first = first
        super().__init__(words, 0, log, [sys.executable], environment)

    def _start(self, words: list[str], variables: dict[str, str]) -> Any:
        return _Started(words, variables, self._log, self._first)

    def processes(self) -> list[int]:
        """Returns all living processes of the job."""
        return sorted({*self.named(""), *super().processes()})

    def named(self, name: str) -> list[int]:
        """Returns the living processes that run a program: the module's last name, or "rank-R"."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    name_of, _, rest = (entry / "stat").read_text().partition(" (")[2].rpartition(") ")
                    mark, _, own = name_of.partition(":")
                    is_of_job = mark == _short(self._mark.partition("=")[2]) and own.startswith(name)
                    if is_of_job and rest[0] != "Z":
                        found.append(int(entry.name))
        return found


class _Started:
    """A process of the fork server, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], log: Path, first: Any) -> None:
        harness.start_fork_server()
        target = harness.context.Process(target=_main, args=(list(words), dict(variables), str(log), first))
        target.start()
        self._process, self.pid = target, target.pid

    def poll(self) -> int | None:
        return self._process.exitcode  # type: ignore[no-any-return]

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return self._process.exitcode  # type: ignore[no-any-return]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _main(words: list[str], variables: dict[str, str], log: str, first: Callable[[], object] | None) -> None:
    """Becomes the first program of a job."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: a test that is killed leaves nothing
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_APPEND)):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(Path(log).parent)
    subprocess.Popen = subprocess_handler.Popen = _Popen  # type: ignore[misc]
    os.posix_spawn, os.execvp = _posix_spawn, _execvp  # type: ignore[assignment]
    _become(words, variables, first)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, args: Any, **options: Any) -> None:
        words = [os.fspath(word) for word in args]
        first = None
        if words[0] == "ssh" and HOSTS in os.environ:
            first = partial(move_to_host, json.loads(os.environ[HOSTS])[words[-2]])
            words = shlex.split(words[-1])
            words = words[words.index(sys.executable) :]
        if words[0] == sys.executable and (words[1] == "-m" or not words[1].startswith("-")):
            # Called in the child in place of the exec, which does not come to pass.
            options["preexec_fn"] = partial(_become, words, options.get("env"), first)
            with _forking():
                super().__init__(args, **options)
        else:
            super().__init__(args, **options)


def _posix_spawn(path: str, words: Sequence[str], environment: Mapping[str, str], **options: Any) -> int:
    if path != sys.executable:
        return _spawn(path, words, environment, **options)
    with _forking():
        pid = os.fork()
        if pid == 0:
            ((_, descriptor, name, flags, mode),) = options["file_actions"]
            opened = os.open(name, flags, mode)
            os.dup2(opened, descriptor)
            os.setsid()
            _become(words, environment)
    return pid


@contextlib.contextmanager
def _forking() -> Iterator[None]:
    """Holds signals back that would come to the handlers of the process that forks, and look-ups of names."""
    with _no_fork:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Store(dist.TCPStore):
    """A Store that a process of its own serves, and not a thread of the one that makes it, which forks.

    The server and its clients look up the names of hosts, for which libc has a lock. A process that is forked meanwhile
    would wait for this lock without end.
    """

    def __init__(
        self,
        host_name: str,
        port: int,
        is_master: bool = False,
        master_listen_fd: int | None = None,
        **_: Any,
    ) -> None:
        if is_master:
            own = None if master_listen_fd is None else socket.socket(fileno=master_listen_fd)
            with own or socket.create_server(("", port)) as listener:
                port = listener.getsockname()[1]
                reader, self._end = os.pipe()
                with _forking():
                    self._server = os.fork()
                    if self._server == 0:
                        self._serve(listener, reader)
                os.close(reader)
        with _no_fork:
            super().__init__(host_name, port, wait_for_workers=False)

    def _serve(self, listener: socket.socket, reader: int) -> NoReturn:
        """Runs until the process that has made the Store has ended, or needs it no more."""
        try:
            os.close(self._end)
            os.set_inheritable(reader, True)
            listener.set_inheritable(True)
            _forget()
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
            port = listener.getsockname()[1]
            store = _TCPStore("127.0.0.1", port, master_listen_fd=listener.detach(), **options)
            os.read(reader, 1)
            del store
        finally:
            os._exit(0)

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            os.close(self._end)
            with contextlib.suppress(ChildProcessError):  # the agent has waited for it already
                os.waitpid(self._server, 0)


def _execvp(path: str, words: Sequence[str]) -> None:
    if path != sys.executable:
        _execute(path, words)
    _become(words, dict(os.environ))


def _become(
    words: Sequence[str], variables: Mapping[str, str] | None, first: Callable[[], object] | None = None
) -> NoReturn:
    """Runs a program in place of this one, as after an exec of the interpreter."""
    status = 1
    try:
        _forget()
        if variables is not None:
            os.environ.clear()
            os.environ.update(variables)
        if first is not None:
            first()
        status = _status_of(words[1:])
    finally:
        harness.end(status)


def _forget() -> None:
    """Ends what an exec ends: locks, handlers of signals, descriptors that are not inherited."""
    global _no_fork
    _no_fork = threading.Lock()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    # Their numbers stay taken: libuv, of which the first process may have a Store, closes its own after a fork.
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder
            if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.dup2(nothing, int(name), inheritable=False)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    sys.__stderr__, sys.excepthook = sys.stderr, sys.__excepthook__  # type: ignore[misc]
    atexit._clear()  # the ends of the process before, as the removal of its temporary folders
    gc.enable()  # subprocess has turned it off
    torch.set_num_threads(1)


def _status_of(words: Sequence[str]) -> int:
    """Runs `python WORDS`; returns the exit status."""
    try:
        try:
            _run(words)
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        return 0
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]


def _run(words: Sequence[str]) -> None:
    is_module = words[0] == "-m"
    rank = os.environ.get("RANK")
    name = words[1].rpartition(".")[2] if is_module else f"rank-{rank}" if rank else "script"
    mark = f"{_short(os.environ.get(MARK, ''))}:{name}"[:15]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, mark.encode())
    sys.argv = list(words[1:] if is_module else words)
    dist.TCPStore = c10d_rendezvous_backend.TCPStore = _Store if name in _HOLDERS else _TCPStore  # type: ignore[misc]
    if is_module:
        module = importlib.import_module(words[1])
        sys.exit(module.main())
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _short(mark: str) -> str:
    return mark[:6]
