"""If the system refuses memory or threads, the operation concerned fails; the process lives, and no data is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from injection import refusals
from scripts import Job, started


def test_what_the_system_refuses(tmp_path: Path) -> None:
    script = Path(__file__).parent / "refusals.py"
    job = Job([script], 1, tmp_path / "output.txt", [sys.executable], {"LD_PRELOAD": str(refusals())})
    with started([job]):
        status = job.wait(120.0)
    assert status == 0, job.output
