"""Tests of the fake device itself, on which the tests of device tensors run."""

from __future__ import annotations

import device_double
import pytest
import torch
from device_double import DEVICE, current_stream, held
from harness import on_ranks

pytestmark = pytest.mark.usefixtures("compiled_double")


@on_ranks(1)
def test_an_event_of_a_held_stream_has_not_happened_until_its_release() -> None:
    device_double.load()
    stream, event = torch.Stream(device=f"{DEVICE}:0"), torch.Event(device=DEVICE)
    with held(stream):
        event.record(stream)
        assert not event.query()
    event.synchronize()
    assert event.query()


@on_ranks(1)
def test_freed_memory_is_overwritten_at_once_unless_another_stream_was_recorded() -> None:
    double = device_double.load()
    stream = torch.Stream(device=f"{DEVICE}:0")
    kept, lost = torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE)
    # These views bypass the allocator, as a kernel does.
    views = [double.host_view(tensor) for tensor in (kept, lost)]
    with held(stream):
        torch.Event(device=DEVICE).record(stream)  # gives the stream some work
        kept.record_stream(stream)
        del kept, lost
        assert [bool(view.eq(1).all()) for view in views] == [True, False]
    stream.synchronize()
    assert not views[0].eq(1).all()


@on_ranks(1)
def test_a_write_to_freed_memory_is_counted() -> None:
    double = device_double.load()
    tensor = torch.zeros(8, device=DEVICE)
    view = double.host_view(tensor)
    del tensor
    before, saved = double.written_after_free(), view.clone()
    view.zero_()
    assert double.written_after_free() == before + 1
    view.copy_(saved)


@on_ranks(1)
def test_the_log_tells_who_waits_for_whom() -> None:
    device_double.load()
    stream, event = torch.Stream(device=f"{DEVICE}:0"), torch.Event(device=DEVICE)
    device_double.load().clear_stream_log()
    event.record(stream)
    current_stream(0).wait_event(event)
    (_, _, _, number), _ = device_double.load().stream_log()
    assert device_double.load().stream_log() == [
        ("record", 0, stream.stream_id, number),
        ("wait", 0, current_stream(0).stream_id, number),
    ]
