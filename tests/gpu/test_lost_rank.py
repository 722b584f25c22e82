"""Tests of windows of CUDA tensors when a rank is killed: the others go on, and the data that it left is whole."""

from __future__ import annotations

import pytest
import test_device_windows as windows
from test_windows_on_cuda import on_gpu


@pytest.mark.parametrize("what", ["put", "update"])
def test_a_lost_rank(new_window_world, what):
    world = new_window_world(3)
    world.run(on_gpu, windows.prepare_to_be_lost)
    _, lost, _ = world.run_raw(on_gpu, windows.work_until_the_end, what, 0.1)
    assert lost.state == "died"
    outcomes = {o.rank: o for o in world.run_raw(on_gpu, windows.look_after_a_loss)}
    assert all(outcomes[rank].state == "returned" for rank in (0, 2)), "\n".join(map(str, outcomes.values()))
    assert outcomes[2].value == 1.0
    assert outcomes[0].value in (1.0, 2.0, 3.0)
