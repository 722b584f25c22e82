"""A short soak with faults, which must show no failure; and one whose failures must all be seen."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soak_faults
from hosts import Unavailable
from injected_faults import Fault, Schedule
from soak_faults import MODES, Soak
from soak_modes import RANKS, Board, Mode
from soak_totals import Pace, append, loss_ratio, next_steps, result, table, throughput

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


class Counter(Mode):
    """Ranks that only count their steps."""

    initialize = False

    def step(self) -> bool:
        return bool(self.board.over[0])


def test_a_fault_that_cannot_happen_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the ranks trained on until they counted as stuck."""

    def fail(*_: object, **__: object) -> None:
        raise Unavailable("no tc")

    monkeypatch.setattr(soak_faults.Fault, "inject", fail)
    soak = Soak({"counter": Counter}, seed=1)
    with pytest.raises(Unavailable, match="no tc"):
        soak._run_world("counter", Schedule([Fault(0.0, 0, "stop", 0.1)]), 0.0, 1, soak.totals["counter"])
