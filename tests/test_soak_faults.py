"""A short soak with faults, which must show no failure; and one whose failures must all be seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import soak_faults
from fogdist.testing.faults import Schedule
from harness import BACKEND
from soak_faults import Soak, result, table
from soak_modes import MODES, RANKS, Board, Mode

pytestmark = pytest.mark.skipif(BACKEND != "fog", reason="has fog's own modes in it")


# The same wrapper with another option.
LONG = {"asynchronous-on-loss"}


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[pytest.mark.long] * (mode in LONG)) for mode in sorted(MODES)]
)
def test_faults_harm_only_the_ranks_that_they_happen_to(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    soak = Soak({mode: MODES[mode]}, seed=3, every=(0.2, 0.5), seconds=2.5)
    monkeypatch.setattr(soak_faults, "OWN_SECONDS", 0.3)
    soak.run(0)
    found = result(soak)
    assert not found["failures"], "\n".join(found["modes"][mode]["problems"])
    values = found["modes"][mode]
    assert values["faults"].get("kill", 0) + values["faults"].get("segfault", 0) > 0, values
    assert values["next_step_seconds"]["samples"] > 0 and values["throughput"] > 0, values
    if mode in ("collectives", "reconfigured"):
        assert values["operations_raised"] > 0, values
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
    monkeypatch.setattr(soak_faults, "OWN_SECONDS", 0.1)
    soak = Soak({"broken": Broken}, seed=1)
    totals = soak.totals["broken"]
    try:
        soak._run_world("broken", Schedule([]), 0.5, totals)
    finally:
        for pid in soak_faults.leftovers.leftover_processes():
            os.kill(pid, 9)
        for name in soak_faults.leftovers.shared_memory_entries():
            if name.startswith("fog-test-"):
                os.unlink(f"/dev/shm/{name}")
    assert (totals.hangs, totals.crashes, totals.orphans, totals.leftovers) == (1, 1, 1, 1), totals
    assert 0 < totals.wrong <= 5 and len(totals.problems) >= RANKS, totals
    assert result(soak)["failures"] == totals.failures
