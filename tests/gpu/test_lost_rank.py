"""Windows of CUDA tensors when a rank is killed: the others' go on, and what it left is whole."""

from __future__ import annotations

import pytest
import test_device_windows as windows
from test_windows_on_cuda import on_cuda


@pytest.mark.parametrize("transport", windows.TRANSPORTS)
def test_a_lost_rank(new_world, gpu_environment, transport):
    world = new_world(3, timeout=60.0, environment=gpu_environment(3))
    world.run(on_cuda, windows.prepare_to_be_lost, transport)
    _, lost, _ = world.run_raw(on_cuda, windows.put_until_the_end, 0.1)
    assert lost.state == "died"
    outcomes = {o.rank: o for o in world.run_raw(on_cuda, windows.look_after_a_loss, transport)}
    assert all(outcomes[rank].state == "returned" for rank in (0, 2)), "\n".join(map(str, outcomes.values()))
