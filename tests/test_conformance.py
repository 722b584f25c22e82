"""Runs a fast part of PyTorch's own distributed suite; `make conformance` runs all of it.

docs/measurements/conformance.md has the counts. The suite's driver is not part of this repository. Ranks are forked here, which
makes the cases some ten times faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ALL

# The path of the driver; `make` sets it.
DRIVER_VARIABLE = "CONFORMANCE"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DRIVER = ROOT.parent / "shared" / "conformance" / "torch_distributed_suite.py"
# The timeout if a case hangs; the cases take a fraction of a minute on an idle machine.
TIMEOUT = 900.0

# Cases that cover most of their kind.
CASES = [
    "test_accumulate_gradients_no_sync",
    "test_batch_isend_irecv_gloo_tags",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
]
if ALL:
    CASES += [
        "test_all_gather_coalesced_with_empty",
        "test_all_gather_object_default_pg",
        "test_all_reduce_coalesced_sum",
        "test_isend_autograd_profiler",
        "test_reduce_max",
    ]


def test_part_of_the_suite(tmp_path: Path) -> None:
    driver = Path(os.environ.get(DRIVER_VARIABLE) or DEFAULT_DRIVER)
    if not driver.is_absolute():
        driver = ROOT / driver
    if not driver.is_file():
        pytest.skip(f"the suite's driver is not at {driver}; name it in {DRIVER_VARIABLE}")
    report = tmp_path / "report"
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "forked_suite.py"), str(driver)]
        + [f"TorchDistributedSuite.{case}" for case in CASES],
        check=False,
        env={
            **os.environ,
            "SUITE_BACKEND": "fog",
            "SUITE_WORLD_SIZE": "3",
            "SUITE_REPORT": str(report),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-8000:]
    lines = [line.split() for line in report.read_text().splitlines()]
    # Without this check, a case that torch has renamed or disabled would pass because it does not run.
    assert sorted(name for status, name in lines if status == "pass") == sorted(CASES)
