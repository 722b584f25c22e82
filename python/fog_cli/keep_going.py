"""`fog run` on several hosts, and --keep-going: one agent per host starts the ranks.

A rank that fails ends all others, or with --keep-going no other. This side starts the
agents (`fog_cli.programs.agent`), copies their output, passes signals on, and reports the ranks that died. With
--keep-going the agents of several hosts go on without this side, unless it has told them to end.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from fog_cli import launchers, processes
from fog_cli.launchers import Job
from fog_cli.processes import describe
from fog_cli.programs.rank import STATUS_OF_VICTIM, write_whole


@dataclass
class Fate:
    """What happened to a rank.

    Attributes:
        host: The number of its host.
        failures: Its processes that did not end well: how each of them ended.
        status: The exit status of its last process, or the negative number of the signal; None while it runs, or may be
            started again.
        starts: How often it was started again.
    """

    host: int
    failures: list[str] = field(default_factory=list)
    status: int | None = None
    starts: int = 0


def _signal_of(status: int) -> int:
    """Returns the negative number of the signal if an exit status of a shell, or of ssh, stands for one."""
    return 128 - status if 128 < status <= 128 + signal.SIGRTMAX else status


class _Agent:
    """The process of an agent, or the ssh that started it."""

    def __init__(
        self, number: int, token: str, command: Sequence[str], events: queue.SimpleQueue[Any]
    ) -> None:
        self.number = number
        self.said: set[str] = set()  # the events that it has told of
        self._token = token.encode()
        self._events = events
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C of the terminal is for this process only, which passes it on
        )
        self._started = processes.identified([self._process.pid])
        self._copies = [
            threading.Thread(target=self._copy, args=words, daemon=True)
            for words in ((self._process.stdout, 1), (self._process.stderr, 2))
        ]
        for thread in (*self._copies, threading.Thread(target=self._await_end, daemon=True)):
            thread.start()

    def write(self, value: object) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or the connection is closed
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Closes the connection. The agent then ends its ranks and itself, if it does not go on without this side."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kills the agent, or the program that connects to it, with all processes of this host below it."""
        processes.kill_with_descendants(self._started)

    def _copy(self, source: IO[bytes], target: int) -> None:
        """Copies output in whole lines, but takes what the agent tells."""
        for line in source:
            token, _, text = line.partition(b" ")
            if token != self._token:
                write_whole(target, line)
                continue
            with contextlib.suppress(ValueError):  # a line that was cut as the agent was killed
                told = json.loads(text)
                self.said.add(told["event"])
                self._events.put(("told", self.number, told))

    def _await_end(self) -> None:
        status = self._process.wait()
        # What the agent has told comes first. If only its guard was killed, it still ends the ranks.
        for copy in self._copies:
            copy.join(processes.STOP_TIMEOUT if status < 0 else processes.OUTPUT_TIMEOUT)
        self._events.put(("ended", self.number, status))


class Supervisor:
    """Starts the agents of a job and waits for their end."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()  # whose `put` signal handlers may call
        self._agents: dict[int, _Agent] = {}
        self._fates: dict[int, Fate] = {}
        self._ports: dict[int, int] = {}  # of the agents' Stores; the ranks start when all have told theirs
        self._has_begun = False
        self._signal: int | None = None
        self._is_stopping = False  # after a signal, or because the job cannot start
        # When to do something in any case: to end the ranks, or to kill what has not ended.
        self._deadline: tuple[float, Callable[[], None]] | None = None
        self._first_status = 0  # of the rank, or the agent, that failed first
        self._status_of_victim = 0  # of the first rank that ended because it had lost another one
        # Ranks that have ended and may be started again: how, and with which status. Before that, all agents are asked,
        # in a question with a number, which ranks have a group.
        self._undecided: dict[int, tuple[str, int]] = {}
        self._question = 0
        self._asked: set[int] = set()
        self._members: set[int] = set()
        only, self._run_id = job.only_host, str(uuid.uuid4())
        if only is not None:  # the same on all hosts
            self._run_id = job.environment.get("TORCHELASTIC_RUN_ID") or "fog"
        self._hosts = range(len(job.hosts)) if only is None else [only]
        for number in self._hosts:
            self._fates |= {rank: Fate(number) for rank in job.ranks_of(number)}

    def run(self) -> int:
        """Runs the job to its end; returns the exit status of `fog run`."""
        before = {number: signal.getsignal(number) for number in processes.SIGNALS}
        try:
            for number in before:
                if before[number] is not signal.SIG_IGN:  # an ignored signal, as under nohup, stays ignored
                    signal.signal(number, self._on_signal)
            for host in self._hosts:
                self._start(host)
            while self._agents:
                self._handle()
        finally:
            for agent in self._agents.values():  # after an error
                agent.write({"signal": int(signal.SIGTERM)})
                agent.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        self._summarize()
        if self._signal is not None:
            return 128 + self._signal
        return self._first_status or self._status_of_victim

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._events.put(("signal", number, None))

    def _start(self, number: int) -> None:
        job = self._job
        token = f"fog-{uuid.uuid4()}"
        agent = self._agents[number] = _Agent(number, token, job.starts[number], self._events)
        agent.write(
            {
                "token": token,
                "command": job.rank,
                "environment": launchers.of_host(
                    job.environment, job.ranks, job.hosts[number].slots, number, self._run_id
                ),
                "folder": os.getcwd(),
                "size": job.ranks,
                "first": job.ranks_of(number)[0],
                "count": job.hosts[number].slots,
                "host": number,
                "port": job.port if number == 0 or job.only_host is not None else 0,
                "serves": number == 0 or job.keeps_going,
                "stays": number == 0 and len(self._hosts) > 1,
                "max_restarts": job.max_restarts,
                "goes_on": job.keeps_going and len(self._hosts) > 1,
            }
        )

    def _handle(self) -> None:
        """Waits for the next event, and handles it."""
        at, action = self._deadline or (None, None)
        try:
            kind, number, value = self._events.get(timeout=at and max(at - time.monotonic(), 0.0))
        except queue.Empty:
            assert action is not None
            self._deadline = None
            action()
            return
        if kind == "signal":
            self._stop(number)
        elif kind == "ended":
            self._on_agent_end(number, value)
        elif value["event"] == "begun":
            self._ports[number] = value["port"]
            self._has_begun = self._ports.keys() == set(self._hosts)
            if self._has_begun and len(self._job.hosts) > 1:
                stores = self._job.stores(self._ports)
                for agent in self._agents.values():
                    agent.write({"stores": stores, "is_only": self._job.only_host is not None})
        elif value["event"] == "ended":
            self._on_rank_end(number, value)
        elif value["event"] == "members":
            if value["question"] == self._question:
                self._members |= set(value["ranks"])
                self._asked.discard(number)
                self._decide()
        elif value["event"] == "waits":
            _say(f"the agent{self._on(number)} waits for the Stores at {', '.join(value['stores'])}")
        elif value["failure"]:  # it is done
            _say(f"the agent{self._on(number)}: {value['failure']}")
            self._first_status = self._first_status or 1
            if not self._is_stopping:  # the ranks of other hosts would wait for those of this one
                self._end_ranks()

    def _stop(self, number: int) -> None:
        """Sends the first signal to all ranks; a second one kills them."""
        if self._signal is None:
            self._signal = number
            self._end_ranks(number, processes.STOP_TIMEOUT)
        else:
            self._end_ranks(signal.SIGKILL, processes.OUTPUT_TIMEOUT)

    def _end_ranks(self, number: int = signal.SIGTERM, timeout: float = processes.STOP_TIMEOUT) -> None:
        """Sends a signal to all ranks, and after the timeout kills the agents."""
        self._is_stopping = True
        self._deadline = time.monotonic() + timeout, self._kill
        for agent in self._agents.values():
            agent.write({"signal": int(number)})

    def _kill(self) -> None:
        for agent in self._agents.values():
            agent.close()
            agent.kill()

    def _on_rank_end(self, number: int, told: dict[str, Any]) -> None:
        rank, status = told["rank"], told["status"]
        fate = self._fates.get(rank)
        if fate is None or told["restarts"] != fate.starts:  # it was ended because all ranks start again
            return
        if status == 0 or self._is_stopping:
            fate.status = status
            return
        why = "because it had lost another rank" if status == STATUS_OF_VICTIM else describe(status)
        how = f"(process {told['pid']}{self._on(number)}) ended {why} after {told['seconds']:.1f} s"
        fate.failures.append(how)
        if len(fate.failures) > self._job.max_restarts:
            self._lose(rank, status, how)
            return
        self._undecided[rank] = how, status
        self._question += 1
        self._asked, self._members = set(self._agents), set()
        for agent in self._agents.values():
            agent.write({"members": self._question})

    def _decide(self) -> None:
        """Decides how ranks that have ended start again, once agents have answered the last question."""
        if (self._asked and not self._members) or not self._undecided or self._is_stopping:
            return
        ended, self._undecided = self._undecided, {}
        if self._members or self._job.only_host is not None:
            for rank, (how, _) in ended.items():
                fate = self._fates[rank]
                self._say_again(rank, how, "it starts")
                fate.starts += 1
                self._agents[fate.host].write({"start": rank, "restarts": fate.starts})
        elif any(fate.status is not None for fate in self._fates.values()):
            for rank, (how, status) in ended.items():
                self._lose(
                    rank, status, f"{how}; it does not start again, as no rank is left that it could join"
                )
        else:
            for rank, (how, _) in ended.items():
                self._say_again(rank, how, "no other has a group that it could join, so all ranks start")
            self._start_all()

    def _start_all(self) -> None:
        """Starts the job again as a whole."""
        for fate in self._fates.values():
            fate.starts += 1
        self._ports.clear()
        self._has_begun = False
        for agent in self._agents.values():
            agent.write({"again": {rank: fate.starts for rank, fate in self._fates.items()}})

    def _say_again(self, rank: int, how: str, who: str) -> None:
        times = f"{len(self._fates[rank].failures)} of {self._job.max_restarts}"
        _say(f"rank {rank} {how}; {who} again ({times})")

    def _lose(self, rank: int, status: int, how: str) -> None:
        """Reports a rank that is not started again."""
        fate = self._fates[rank]
        fate.status = status
        self._agents[fate.host].write({"leave": rank})
        code = status if status > 0 else 128 - status
        if status == STATUS_OF_VICTIM:
            self._status_of_victim = self._status_of_victim or code
        else:
            self._first_status = self._first_status or code
        left = sum(each.status is None for each in self._fates.values())
        if self._job.keeps_going:
            _say(f"rank {rank} {how}; {left} rank{'s' if left != 1 else ''} go{'es' if left == 1 else ''} on")
        elif status != STATUS_OF_VICTIM:
            self._end_ranks()
        elif self._deadline is None:  # the rank that it has lost may take longer to end, and is the cause
            self._deadline = time.monotonic() + processes.OUTPUT_TIMEOUT, self._end_ranks

    def _on_agent_end(self, number: int, status: int) -> None:
        agent = self._agents.pop(number)
        self._asked.discard(number)
        if "done" not in agent.said:
            how = f"the agent{self._on(number)}, which ended {describe(_signal_of(status))}"
            lost = [rank for rank, fate in self._fates.items() if fate.host == number and fate.status is None]
            for rank in lost:
                self._fates[rank].failures.append(f"was lost with {how}")
                self._fates[rank].status = status or 1
                self._undecided.pop(rank, None)
            listed = (
                f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}" if lost else "nothing else"
            )
            _say(f"{listed} lost with {how}")
            self._first_status = self._first_status or (status if status > 0 else 128 - status) or 1
        elif status < 0:
            _say(
                f"the guard of the agent{self._on(number)} ended {describe(status)}, so the agent ended its ranks"
            )
        self._decide()
        if not self._has_begun and not self._is_stopping:
            _say(f"the job cannot start without {self._job.hosts[number].name}, so its other ranks are ended")
            self._end_ranks()
        elif "done" not in agent.said and not self._job.keeps_going:
            self._end_ranks()
        if list(self._agents) == [0]:
            self._agents[0].write({"others": "ended"})  # the Store ends with its own ranks

    def _summarize(self) -> None:
        lost = {rank: fate for rank, fate in sorted(self._fates.items()) if fate.failures}
        if not lost:
            return
        well = sum(fate.status == 0 for fate in self._fates.values())
        lines = [f"{well} of {len(self._fates)} ranks ended well"]
        # The last lines are those about the cause.
        for rank, fate in sorted(lost.items(), key=lambda entry: entry[1].status != STATUS_OF_VICTIM):
            rest = "; started again, and ended well" if fate.status == 0 else ""
            lines.append(f"  rank {rank} {'; then '.join(fate.failures)}{rest}")
        _say("\n".join(lines))

    def _on(self, number: int) -> str:
        """Names the host, if there are several."""
        hosts = self._job.hosts
        return f" on {hosts[number].name}" if len(hosts) > 1 else ""


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the reader has closed it
        print(f"fog run: {text}", file=sys.stderr, flush=True)


def run(job: Job) -> int:
    """Runs a job; returns the exit status of the rank that failed first, or 0.

    Raises:
        OSError: An agent cannot be started.
    """
    return Supervisor(job).run()
