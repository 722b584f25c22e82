"""Tests of the fake device itself, on which the tests of device tensors run."""

from __future__ import annotations

import copy
from typing import Any

import device_double
import pytest
import torch
from device_double import DEVICE, current_stream, held
from harness import WorldPool

pytestmark = pytest.mark.usefixtures("compiled_double")


def train(optimizer: Any) -> None:
    device_double.load()
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.BatchNorm2d(3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 5),
    )
    images, labels = torch.randn(8, 1, 6, 6), torch.randint(0, 5, (8,))
    trained = []
    for device in ("cpu", f"{DEVICE}:1"):
        net_there = copy.deepcopy(net).to(device)
        stepper = optimizer(net_there.parameters(), lr=0.05)
        for _ in range(4):
            stepper.zero_grad()
            torch.nn.functional.cross_entropy(net_there(images.to(device)), labels.to(device)).backward()
            stepper.step()
        assert {str(p.device) for p in net_there.parameters()} == {device}
        trained.append([p.detach().cpu() for p in net_there.parameters()])
    for on_host, on_double in zip(*trained, strict=True):
        torch.testing.assert_close(on_double, on_host)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_training_gives_the_host_s_numbers(worlds: WorldPool, optimizer: Any) -> None:
    worlds(1).run(train, optimizer)


def watch_an_event() -> tuple[bool, bool]:
    device_double.load()
    stream, event = torch.Stream(device=f"{DEVICE}:0"), torch.Event(device=DEVICE)
    with held(stream):
        event.record(stream)
        early = event.query()
    event.synchronize()
    return early, event.query()


def test_an_event_of_a_held_stream_has_not_happened_until_its_release(worlds: WorldPool) -> None:
    assert worlds(1).run(watch_an_event) == [(False, True)]


def free_memory() -> list[bool]:
    double = device_double.load()
    stream = torch.Stream(device=f"{DEVICE}:0")
    kept, lost = torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE)
    # These views bypass the allocator, as a kernel does.
    views = [double.host_view(tensor) for tensor in (kept, lost)]
    with held(stream):
        torch.Event(device=DEVICE).record(stream)  # gives the stream some work
        kept.record_stream(stream)
        del kept, lost
        intact = [bool(view.eq(1).all()) for view in views]
    stream.synchronize()
    return [*intact, bool(views[0].eq(1).all())]


def test_freed_memory_is_overwritten_at_once_unless_another_stream_was_recorded(worlds: WorldPool) -> None:
    assert worlds(1).run(free_memory) == [[True, False, False]]


def write_to_freed_memory() -> list[int]:
    double = device_double.load()
    tensor = torch.zeros(8, device=DEVICE)
    view = double.host_view(tensor)
    del tensor
    counts = [double.written_after_free()]
    saved = view.clone()
    view.zero_()
    counts.append(double.written_after_free())
    view.copy_(saved)
    return counts


def test_a_write_to_freed_memory_is_counted(worlds: WorldPool) -> None:
    assert worlds(1).run(write_to_freed_memory) == [[0, 1]]


def log_streams() -> None:
    device_double.load()
    stream, event = torch.Stream(device=f"{DEVICE}:0"), torch.Event(device=DEVICE)
    device_double.clear_stream_log()
    event.record(stream)
    current_stream(0).wait_event(event)
    (_, _, _, number), _ = device_double.stream_log()
    assert device_double.stream_log() == [
        ("record", 0, stream.stream_id, number),
        ("wait", 0, current_stream(0).stream_id, number),
    ]


def test_the_log_tells_who_waits_for_whom(worlds: WorldPool) -> None:
    worlds(1).run(log_streams)
