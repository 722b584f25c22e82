"""What is installed: what its import costs, what the archives hold, that both install and run."""

from __future__ import annotations

import subprocess
import sys
import typing

import fogdist
import pytest
from fogdist import algorithms, topology

# --- import -------------------------------------------------------------------------------------------------

IMPORT = """
import sys
import torch

before = set(sys.modules)
import fogdist

added = set(sys.modules) - before
packages = {name.partition(".")[0] for name in added} - sys.stdlib_module_names
parts_of_torch = sorted(name for name in added if name.startswith("torch."))
assert packages <= {"fogdist", "fog_pg", "torch", "numpy"}, sorted(packages)
assert not any(name.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")) for name in added), parts_of_torch
assert len(parts_of_torch) < 20, parts_of_torch
assert "fog_pg._C" not in sys.modules

assert str(torch.ops.fog.neighbor_allreduce.default) == "fog.neighbor_allreduce.default"
assert "neighbor_allreduce" in dir(torch.ops.fog), dir(torch.ops.fog)
fogdist.topology.RingGraph(4)
assert "networkx" in sys.modules and "torch._dynamo" not in sys.modules
"""


def test_import_loads_what_is_heavy_later() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [fogdist, topology, algorithms], ids=lambda module: module.__name__)
def test_names_and_their_types_are_there_at_once(module: typing.Any) -> None:
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and name != "plot":  # whose Figure is matplotlib's, which need not be installed
            typing.get_type_hints(value)
