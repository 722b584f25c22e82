"""Tests of fogdist.metrics: bytes, waits and staleness by peer, and the consensus distance."""

from __future__ import annotations

import time
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist.observe.metrics import Metrics
from fogdist.topology import ring


class Recorder:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int | None]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def right_ring() -> None:
    fogdist.init(lambda size: ring(size, connect_style=2))  # each rank sends to the next one
    rank, size = fogdist.rank(), fogdist.size()
    source, destination = (rank - 1) % size, (rank + 1) % size
    x = torch.full((1000,), float(rank))
    fogdist.neighbor_allreduce(x)
    assert fogdist.context.current(None).backend.traffic == {}  # traffic is not counted yet
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(rank))
    with Metrics(model) as metrics:
        for _ in range(5):
            fogdist.neighbor_allreduce(x)
        values = metrics.collect()
        assert values["sent_bytes"] == 5 * 4000 and values["received_bytes"] == 5 * 4000, values
        assert values[f"peer/{destination}/sent_bytes"] == 5 * 4000
        assert values[f"peer/{source}/received_bytes"] == 5 * 4000
        mean = (size - 1) / 2
        distance = (sum((other - mean) ** 2 for other in range(size)) / size) ** 0.5
        assert values["consensus_distance"] == pytest.approx(distance)
        assert "staleness" not in values
        dist.barrier()
        metrics.collect(distance=False)
        # Rank 0 is slow; the next rank waits for it, and its metrics show that.
        for _ in range(3):
            if rank == 0:
                time.sleep(0.3)
            fogdist.neighbor_allreduce(x)
        values = metrics.collect(distance=False)
        assert "consensus_distance" not in values and values["seconds"] > 0.5
        if rank == 1:
            assert values["slowest_peer"] == 0 and values["peer/0/wait_seconds"] > 0.6, values
            assert 0.5 < values["wait_fraction"] <= 1.1
        recorder = Recorder()
        metrics.write(recorder, 7, prefix="train")
        assert ("train/sent_bytes", 12000, 7) in recorder.scalars and len(recorder.scalars) == len(values)
        assert metrics.collect(distance=False)["sent_bytes"] == 0  # since the last call
    with pytest.raises(RuntimeError, match="closed"):
        metrics.collect()
    before = fogdist.context.current(None).backend.traffic
    fogdist.neighbor_allreduce(x)
    assert fogdist.context.current(None).backend.traffic == before
    fogdist.shutdown()


def test_a_ring(new_world):
    new_world(3).run(right_ring)


def windows() -> dict[str, Any]:
    fogdist.init()
    rank = fogdist.rank()
    with Metrics() as metrics:
        window = fogdist.Window(torch.ones(100))
        metrics.collect()
        window.put(torch.ones(100))
        dist.barrier()
        window.get()
        values = metrics.collect()
        assert values[f"peer/{1 - rank}/sent_bytes"] >= 400, values
        assert values[f"peer/{1 - rank}/received_bytes"] >= 400, values
        window.free()
        model = torch.nn.Linear(3, 1)
        optimizer = fogdist.algorithms.WinPut(torch.optim.SGD(model.parameters(), 0.1), model)
        for _ in range(4):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        dist.barrier()
        values = metrics.collect()
        assert values["staleness"] == values[f"peer/{1 - rank}/staleness"] <= 8
        dist.barrier()
        optimizer.close()
        assert "staleness" not in metrics.collect()
    fogdist.shutdown()


def test_windows_and_staleness(new_world):
    new_world(2).run(windows)


def test_before_init():
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        Metrics()
