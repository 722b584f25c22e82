"""Checks the tests of tests/gpu themselves, which need a GPU: one case of each runs on the fake device.

tests/test_device_*.py test the same functions on the fake device in any case.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_double import DEVICE

FOLDER = Path(__file__).resolve().parent / "gpu"


@pytest.mark.long
def test_one_of_each_on_the_double(compiled_double: None) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        env=os.environ | {"FOG_TEST_GPU": DEVICE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=FOLDER.parents[1],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
