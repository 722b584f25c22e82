"""A short soak with faults, which must show no failure; and one whose failures must all be seen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soak_faults
import soak_operations
from fogdist.testing import faults
from fogdist.testing.faults import Fault, Schedule
from soak_faults import MODES, Soak
from soak_modes import RANKS, Board, Mode
from soak_totals import Pace, append, loss_ratio, moments_in, next_steps, result, table, throughput

# Of each pair of modes that go through the same code, one.
LONG = {"asynchronous-on-loss", "collectives", "reconfigured"}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode in LONG)) for mode in sorted(MODES)]
)
def test_faults_harm_only_the_ranks_that_they_happen_to(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak({mode: MODES[mode]}, seed=3, every=(0.2, 0.5), seconds=2.5, twins=int(mode == "neighbors"))
    soak.run(0)
    found = result(soak.totals, RANKS)
    assert not found["failures"], "\n".join(found["modes"][mode]["problems"])
    values = found["modes"][mode]
    assert values["faults"].get("kill", 0) + values["faults"].get("segfault", 0) > 0, values
    assert next_steps(values) and throughput([values]) > 0, values
    if mode in ("collectives", "operations", "reconfigured"):
        assert values["operations_raised"] > 0, values
    if mode == "neighbors":
        # They learn, and in few steps the others' samples change little; the soak itself shows how little.
        (ratio,) = values["loss_ratios"]
        assert max(values["last_losses"]) < 0.9 and 0.5 < ratio < 2.0, values
    if mode == "operations":
        ended = values["faults"].get("kill", 0) + values["faults"].get("segfault", 0)
        assert sum(values["moments"].values()) == ended, values
    assert mode in table(found)


def test_all_moments_of_all_operations_have_their_turn() -> None:
    names = soak_operations.Operations.moments
    assert len(set(names)) == len(names) == 4 * len(soak_operations.OPERATIONS)
    moments = soak_faults.Moments(names, {}, seed=2)
    assert sorted(moments.next() for _ in names) == list(range(1, len(names) + 1))


def test_moments_that_were_missed_come_first(tmp_path: Path) -> None:
    """Those of earlier runs too; one that cannot be hit is tried some times, and then no more often than others."""
    file = tmp_path / "soak.json"
    assert moments_in(file) == {}
    for hits in ({"a": 1, "b": 2}, {"a": 1, "d": 1}):
        append(file, {"modes": {"operations": {"moments": hits}, "neighbors": {"moments": {}}}})
    before = moments_in(file)
    assert before == {"operations": {"a": 2, "b": 2, "d": 1}, "neighbors": {}}
    moments, tried = soak_faults.Moments("abcd", before["operations"], seed=2), ""
    for _ in range(40):
        place = moments.next()
        tried += "abcd"[place - 1]
        if place != 3:
            assert moments.hit(place) == tried[-1]
    assert tried.startswith("cccc" + "d" + "cccc")
    assert min(map(tried.count, "abd")) >= 4 and tried.count("c") <= moments.TRIES * (2 + tried.count("a"))


class Broken(Mode):
    """Ranks that fail in different ways by themselves."""

    patience = 1.0

    def __init__(self, rank: int, board: Board) -> None:
        super().__init__(rank, board)
        if rank == 1:
            subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
            with open(f"/dev/shm/fog-test-{os.getpid()}", "wb"):
                pass
            os._exit(3)

    def step(self) -> bool:
        self.expect("the sum", self.rank != 0)
        time.sleep(3600.0 if self.rank == 2 else 0.001)
        return bool(self.board.over[0]) or self.board.steps[self.rank] > 3


def test_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_faults, "SETTLE_SECONDS", 0.2)
    monkeypatch.setattr(soak_faults, "START_SECONDS", 1.0)
    soak = Soak({"broken": Broken}, seed=1)
    totals = soak.totals["broken"]
    try:
        soak._run_world("broken", Schedule([]), 0.0, 1, totals)
    finally:
        for pid in soak_faults.leftovers.leftover_processes():
            os.kill(pid, 9)
        for name in soak_faults.leftovers.shared_memory_entries():
            if name.startswith("fog-test-"):
                os.unlink(f"/dev/shm/{name}")
    assert (totals.hangs, totals.crashes, totals.orphans, totals.leftovers) == (1, 1, 1, 1), totals
    assert 0 < totals.wrong <= 5 and len(totals.problems) >= RANKS, totals
    assert result(soak.totals, RANKS)["failures"] == totals.failures


def test_what_is_counted(tmp_path: Path) -> None:
    pace = Pace()
    pace.add(np.array([1.0, 2.0, 3.0, 4.0]), 1.0, 3.0, [(0.0, 1.5), (1.2, 1.7)], [(1.5, 2.5)])
    assert pace.steps == 2 and pace.seconds == pytest.approx(1.3)
    assert pace.own_steps == 1 and pace.own_seconds == pytest.approx(1.0)
    pace.add_own(np.array([1.0, 2.0, 3.0]), 0.0, 3.0)
    assert pace.steps == 2 and pace.own_steps == 4 and pace.own_seconds == pytest.approx(4.0)
    # Two steps in 1.3 s, where one a second is usual; nothing is known of three ranks by themselves.
    paces = {"2": dataclasses.asdict(pace), "3": dataclasses.asdict(Pace(5, 1.0))}
    assert throughput([{"paces": paces}]) == pytest.approx(2 / 1.3)
    assert throughput([{"paces": {}}]) is None
    # Another soak counts relative to its own speed, which is ten times as high.
    faster = {"2": dataclasses.asdict(Pace(20, 1.3, 40, 4.0))}
    assert throughput([{"paces": paces}, {"paces": faster}]) == pytest.approx(2 / 1.3)
    # After five steps, the last of them.
    assert loss_ratio([[9.0, 9.0, 9.0, 9.0, 3.0, 0.0]], [[8.0, 8.0, 8.0, 8.0, 1.0], [5.0] * 7]) == 1.0
    assert loss_ratio([], []) is None
    file = tmp_path / "runs.json"
    for seed in (1, 2):
        append(file, {"seed": seed})
    assert json.loads(file.read_text()) == {"runs": [{"seed": 1}, {"seed": 2}]}


class Link:
    """Counts the faults of a link that happen at the same time."""

    def __init__(self) -> None:
        self.now = self.most = self.all = 0

    @contextlib.contextmanager
    def fault(self, device: str, *_: object, namespace: str) -> Iterator[None]:
        self.now += 1
        self.all += 1
        self.most = max(self.most, self.now)
        yield
        self.now -= 1


class Counter(Mode):
    """Ranks that only count their steps."""

    initialize = False

    def step(self) -> bool:
        return bool(self.board.over[0])


def test_faults_of_one_link_do_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = Link()
    for name in ("slow_link", "lossy_link"):
        monkeypatch.setattr(soak_faults, name, link.fault)
    schedule = Schedule(Fault(0.01 * when, 0, "slow" if when % 2 else "lossy", 0.1) for when in range(5))
    board = Board(tmp_path / "board")
    board.steps[:] = soak_faults.WARM_STEPS
    injector = soak_faults._Faults(None, board, schedule, 0.0, 0.0, 0.0, ["host"] * RANKS, None)
    injector.start()
    while not board.over[0] and injector.is_alive():
        time.sleep(0.01)
    injector.finish()
    assert link.all == 5 and link.most == 1 and board.over[0] > 0


def test_a_fault_that_cannot_happen_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the ranks trained on until they counted as stuck."""

    def fail(*_: object, **__: object) -> None:
        raise faults.Unavailable("no tc")

    monkeypatch.setattr(soak_faults.Fault, "inject", fail)
    soak = Soak({"counter": Counter}, seed=1)
    with pytest.raises(faults.Unavailable, match="no tc"):
        soak._run_world("counter", Schedule([Fault(0.0, 0, "stop", 0.1)]), 0.0, 1, soak.totals["counter"])
