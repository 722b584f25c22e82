"""Worlds of ranks that are forked from one process, which has imported everything, and that obey its words."""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from emulated_hosts import move_to_host

from fog_pg._extension import load as load_extension

if TYPE_CHECKING:
    from typing_extensions import Self

# Ranks that wait for each other give up first, and name the ranks for which they waited.
PATIENCE_SECONDS = 10.0
_context = multiprocessing.get_context("fork")


class WorldFailed(RuntimeError):
    """Ranks of a world failed, or did not answer in time."""


def die_with_parent() -> None:
    """Ends this process as soon as the program ends, also if that is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what the program does then is not this process's
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def obey(connection: Connection, rank: int, me: object) -> None:
    """Calls the methods that the parent names, until it says that this is the end."""
    while (word := connection.recv()) is not None:
        name, *arguments = word
        try:
            connection.send(getattr(me, name)(*arguments))
        except BaseException:
            connection.send(f"rank {rank}: {traceback.format_exc(limit=-3)}")
            os._exit(1)
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)


def keep_store(
    connection: Connection, address: str = "127.0.0.1", port: int = 0, host: str | None = None
) -> None:
    """Runs the process of the Store, as torchrun does, so that no rank waits for another one to make it.

    Args:
        connection: Takes the port.
        address: Where it listens.
        port: Where it listens; 0 for any.
        host: The emulated host on which it runs; by default this one.
    """
    die_with_parent()
    if host is not None:
        move_to_host(host)
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()
    os._exit(0)


class ForkedWorld:
    """Ranks from their fork to their end. The first process that is forked is no rank: it has the Store.

    Args:
        title: In errors.
        size: The number of ranks.
        limit: Seconds that a phase may take.
    """

    def __init__(self, title: str, size: int, limit: float) -> None:
        self.title, self.size, self.limit = title, size, limit
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        # Forked processes then neither load the extension, nor traverse and copy these objects.
        load_extension()
        gc.collect()
        gc.freeze()

    def fork(self, function: Callable[..., None], *arguments: object) -> None:
        """Forks a process that calls ``function(connection, *arguments)``."""
        here, there = _context.Pipe()
        process = _context.Process(target=function, args=(there, *arguments), daemon=True)
        process.start()
        there.close()
        self.processes.append(process)
        self.connections.append(here)

    def port(self) -> int:
        """Returns the port of the Store, which its process sends when it listens."""
        if not self.connections[0].poll(self.limit):
            raise self.failed("start", f"the Store was not there after {self.limit:g} s")
        port: int = self.connections[0].recv()
        return port

    def failed(self, phase: str, reason: str) -> WorldFailed:
        """Returns an error that names the world and the phase."""
        return WorldFailed(f"{self.title}, {self.size} ranks, {phase}: {reason}")

    def ask(self, *word: object, patience: float = 0.0) -> tuple[float, list[Any]]:
        """Lets all ranks do something.

        Args:
            word: The name of a method of the ranks, and its arguments.
            patience: Seconds that it may take beyond the limit of a phase.

        Returns:
            The time of the word, and the answers in the order of the ranks.

        Raises:
            WorldFailed: A rank has failed, or the time of a phase is over; it names the ranks.
        """
        phase = " ".join(map(str, word))
        ranks = dict(enumerate(self.connections[1:]))
        begin = time.perf_counter()
        longest = self.limit + patience + PATIENCE_SECONDS
        answers: dict[int, Any] = {}
        try:
            for rank in ranks.values():
                rank.send(word)
            while ranks:
                ready = wait(list(ranks.values()), max(0.0, begin + longest - time.perf_counter()))
                if not ready:
                    named = ", ".join(map(str, list(ranks)[:20])) + (" ..." if len(ranks) > 20 else "")
                    raise self.failed(phase, f"no answer of {len(ranks)} ranks within {longest:g} s: {named}")
                for number in [number for number, rank in ranks.items() if rank in ready]:
                    answers[number] = ranks.pop(number).recv()
                    if isinstance(answers[number], str):
                        raise self.failed(phase, answers[number])
        except (EOFError, OSError) as error:
            raise self.failed(phase, f"a rank has gone: {error!r}") from error
        return begin, [answers[number] for number in sorted(answers)]

    def end(self) -> float:
        """Lets all ranks end; returns the milliseconds until the last one has ended."""
        begin = time.perf_counter()
        for rank in self.connections[1:]:
            rank.send(None)
        living = {process.sentinel: rank for rank, process in enumerate(self.processes[1:])}
        while living:
            ended = wait(list(living), max(0.0, begin + self.limit - time.perf_counter()))
            if not ended:
                raise self.failed("end", f"ranks {sorted(living.values())} live on after {self.limit:g} s")
            for sentinel in ended:
                del living[sentinel]
        return 1e3 * (time.perf_counter() - begin)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the processes that are left."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE_SECONDS)
        for connection in self.connections:
            connection.close()
