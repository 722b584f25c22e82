"""A short soak of a job that loses the host of the Store while processes join, and what such a soak must find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soak_joins
from hosts import Unavailable
from joining_ranks import FIRST_TARGET, RATE, JoinBoard
from soak_joins import KEEPS_MEAN, Kill, Soak, check_averages, summary, table, together
from soak_modes import RANKS

# With it, the host of rank 0 is lost first.
SEED = 3


def run(soak: Soak, number: int) -> None:
    try:
        soak.run(number)
    except Unavailable as reason:
        pytest.skip(f"several hosts: {reason}")


@pytest.mark.parametrize(
    "kind", ["wrapper/async", *(pytest.param(kind, marks=pytest.mark.long) for kind in sorted(KEEPS_MEAN))]
)
def test_a_job_outlives_its_hosts(kind: str) -> None:
    """The first kill is that of the host with rank 0, the Store in use and its agent."""
    soak = Soak([kind], seed=SEED, kills=2)
    run(soak, 0)
    found = summary(soak)
    values = found["modes"][kind]
    assert not found["failures"], "\n".join(values["problems"])
    shown = together([found | {"seed": SEED, "minutes": 0.1, "load": []}])
    assert sum(shown["kills"].values()) >= 2 and values["special"]["rank 0"] >= 1, values
    assert kind not in soak_joins.JOINED or values["joins"] >= 2, values
    assert values["averages_checked"] > 0 and shown["next_step_seconds"]["hosts: host"]["count"] >= 2, shown
    assert "throughput, hosts" in table(shown)


def test_a_job_that_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks raise at their start."""
    monkeypatch.setattr(soak_joins, "START", 2.0)
    soak = Soak(["NoSuchKind"], seed=1)
    run(soak, 0)
    totals = soak.totals["NoSuchKind"]
    assert totals.hangs == 1 and "the ranks do not begin" in totals.problems[0], totals


def test_wrong_averages_are_found(tmp_path: Path) -> None:
    board = JoinBoard(tmp_path / "board")
    targets = FIRST_TARGET + np.arange(RANKS)
    values = np.stack([targets, targets], axis=1)
    for step in range(1, 5):
        after = np.full_like(values, (values - RATE * (values - targets[:, None])).mean())
        for rank in range(RANKS):
            board.records[rank, step - 1] = (0.0, step, (1, 1), values[rank], after[rank], 2**RANKS - 1)
            board.steps[rank] = step
        values = after
    assert check_averages(board, "LocalSGD") == (4, [])
    board.records["after"][2, 1] += 0.01  # a sum is wrong, and the ranks differ after an average
    board.records["epochs"][3, 2, 0] = 0.0  # in this step the epoch changes, so it is left out
    checked, wrong = check_averages(board, "LocalSGD")
    assert checked == 3 and len(wrong) == 2 and all("epoch 1, step 2" in each for each in wrong), wrong
    board.records["after"][0, 3] = 100.0
    assert any("is no average" in each for each in check_averages(board, "wrapper/async")[1])


def test_errors_of_members_count_unless_they_were_killed(tmp_path: Path) -> None:
    job = soak_joins.Job(
        "wrapper", [], soak_joins.ON_HOSTS, tmp_path, {}, soak_joins.random.Random(1), 0.0, (0.0, 0.0)
    )
    lines = [{"rank": rank, "member": rank != 1, "error": "why", "at": 5.0} for rank in range(4)]
    (tmp_path / "failed").write_text("\n".join(map(soak_joins.json.dumps, lines)))
    job.kills = [Kill("silent host", 4.5, (2, 3))]
    assert job.failures() == ["rank 0 raised: why"]
