"""The benchmarks run to their end, on tiny sizes, and write what they promise. Numbers are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_collectives(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="raw MPI is measured through mpi4py", exc_type=ImportError)
    pytest.importorskip("matplotlib", reason="draws the plot")
    numbers, picture, log = tmp_path / "numbers.json", tmp_path / "picture.png", tmp_path / "log"
    options = ["--ranks", "2", "--sizes", "4", "64K", "--iterations", "3", "--dtypes", "float32", "bfloat16"]
    with log.open("wb") as file:
        status = subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks" / "collectives.py",
                *options,
                *("--json", numbers, "--plot", picture),
            ],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
            timeout=100,
            check=False,
        ).returncode
    printed = log.read_text()
    assert status == 0, printed
    rows = json.loads(numbers.read_text())["rows"]
    # Six operations at two sizes, allreduce also of bfloat16, and the barrier.
    assert len(rows) == 6 * 2 + 2 + 1, printed
    for row in rows:
        systems = {"fog", "gloo", "nothing"}
        systems |= {"mpi"} if row["dtype"] == "float32" else set()
        systems |= {"memory"} if row["operation"] != "barrier" else set()
        assert set(row["times"]) == systems, row
        for times in row["times"].values():
            assert 0 < times["lower"] <= times["median"] <= times["upper"], row
    allgather = next(r for r in rows if r["operation"] == "allgather" and r["bytes"] == 64 << 10)
    assert allgather["bytes_moved"] == 3 * allgather["bytes"]
    assert picture.stat().st_size > 1000
    assert len(printed.splitlines()) >= len(rows) + 2
