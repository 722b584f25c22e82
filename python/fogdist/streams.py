"""Streams of devices of any kind: the order of work on a device, and when it is complete.

A gradient is ready on the stream that its backward pass runs on, and hooks of autograd run with that stream as the
current one. Code that uses several gradients together must follow all their streams. Data that reaches other ranks
without the device, such as a number in a window of the CPU, would overtake the device's pending work, so it must wait for
a `Mark`. A CPU has no streams, and there these classes do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

# Between two looks whether operations are done, in seconds.
_SLEEP = 50e-6


class StreamJoin:
    """The streams on which parts of a whole become ready.

    Args:
        device: Of the parts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.Stream] = []

    def add(self) -> None:
        """Takes note that a part is ready on the current stream."""
        stream = current_stream(self._device)
        if stream is not None and stream not in self._streams:
            self._streams.append(stream)

    def join(self) -> None:
        """Lets the current stream wait for the parts, and forgets them. The host does not wait."""
        streams, self._streams = self._streams, []
        current = current_stream(self._device)
        if current is not None:
            for stream in streams:
                if stream != current:
                    current.wait_stream(stream)


class Mark:
    """A point in the work of a device's current stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(current_stream(device))

    def is_reached(self) -> bool:
        """Whether the device has done all that came before."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Returns when it has: the host waits."""
        if self._event is not None:
            self._event.synchronize()


def current_stream(device: torch.device) -> torch.Stream | None:
    """Returns the current stream of a device; None for a CPU, and where torch knows no streams of that type."""
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.accelerator.current_stream(device)


def wait_until_complete(works: Sequence[dist.Work]) -> None:
    """Waits until operations are complete, even if `wait` only orders the work of a device; does not report failures."""
    while not all(work.is_completed() for work in works):
        time.sleep(_SLEEP)
