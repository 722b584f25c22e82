"""Merges the timelines of the ranks into one file with one clock.

Ranks of one machine share a clock. The offset between two machines is computed from the messages: a message cannot
arrive before it was sent, so each message in one direction gives a lower bound of the offset and each message in the
other direction an upper bound. The middle of the tightest two bounds is wrong by at most half the round-trip time of a
small message. The offset is one number, so clocks that drift apart are right in the middle of a timeline. Machines that
exchanged no messages keep their wall clocks. (The bounds are those of Cristian, "Probabilistic clock synchronization",
Distributed Computing 3, 1989.)
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# More than the nanoseconds of a century.
_LONGEST = 4e18


@dataclass
class _Trace:
    """The timeline of one rank."""

    path: Path
    rank: int
    size: int
    clock: str
    wall: float  # microseconds of the wall clock when this trace's clock was 0
    events: list[Event]
    # The time when an operation began on this rank, and its slice, by the operation's key, which is the same on all
    # ranks.
    operations: dict[str, tuple[float, Event]] = field(default_factory=dict)


def merge(
    traces: Sequence[str | os.PathLike[str]] | str | os.PathLike[str], output: str | os.PathLike[str]
) -> int:
    """Merges the timelines of several ranks into one, with one clock that begins at 0.

    In each operation an arrow goes to the receiver from the sender whose message arrived last. The incomplete file of a
    killed rank is read as far as possible.

    Args:
        traces: The files of the ranks; or their common prefix, which a number and ".json" follow.
        output: The file to write, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show.

    Returns:
        The number of ranks.

    Raises:
        ValueError: There are no such files, one is not a timeline of fog, or two are of the same rank.
        OSError: A file cannot be read or written.
    """
    if isinstance(traces, (str, os.PathLike)):
        traces = files_of(traces)
    read = sorted((_read(Path(path)) for path in traces), key=lambda trace: trace.rank)
    if not read:
        raise ValueError("traces must have at least one file, got none")
    for one, other in itertools.pairwise(read):
        if one.rank == other.rank:
            raise ValueError(f"traces: {one.path} and {other.path} are both of rank {one.rank}")
    offsets = clock_offsets(read)
    _write(read, offsets, Path(output))
    return len(read)


def files_of(prefix: str | os.PathLike[str]) -> list[Path]:
    """Returns the timelines that were recorded with a prefix, by rank.

    Raises:
        ValueError: There are none.
    """
    text = os.fspath(prefix)
    folder, start = os.path.split(text)
    found = []
    parent = Path(folder or ".")
    for path in parent.iterdir() if parent.is_dir() else ():
        number = path.name[len(start) :].removesuffix(".json")
        if path.name.startswith(start) and path.name.endswith(".json") and number.isdecimal():
            found.append((int(number), path))
    if not found:
        raise ValueError(f"traces: got the prefix {text!r}, but there is no file {text}<rank>.json")
    return [path for _, path in sorted(found)]


def _events(path: Path) -> Iterator[Event]:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):  # the rank was killed while it wrote this line
                return
            raise ValueError(f"traces: {path}, line {number}: {error}") from None
        if not isinstance(event, dict):
            raise ValueError(f"traces: {path}, line {number} is no event")
        yield event


def _read(path: Path) -> _Trace:
    events = list(_events(path))
    if not events or events[0].get("name") != "fog_timeline":
        raise ValueError(f"traces: {path} is not a timeline of fog")
    event = events[0]
    try:
        about = event["args"]
        wall = _time(about["wall_clock_ns_at_zero"]) / 1e3
        trace = _Trace(path, int(about["rank"]), int(about["size"]), str(about["clock"]), wall, events)
        for event in events:
            _ = event["name"], _time(event.get("ts", 0.0))
            key = event["args"].get("key") if event.get("cat") == "operation" else None
            if key is not None:
                _ = event["tid"], [int(rank) + _time(wait) for rank, wait in event["args"]["wait_us"].items()]
                trace.operations[key] = (event["ts"] + _time(event["args"]["queued_us"]), event)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"traces: {path} has an event that fog does not write, {event}: {error!r}") from None
    return trace


def _time(value: Any) -> float:
    """Returns a time, or raises ValueError if it is none that a clock shows."""
    if not abs(value) < _LONGEST:
        raise ValueError(f"{value} is no time")
    return float(value)


def _messages(sender: _Trace, receiver: _Trace) -> Iterator[tuple[float, float]]:
    """Yields the times when the sender began an operation and its message arrived, each on the rank's own clock."""
    for key, (begun, event) in receiver.operations.items():
        wait = event["args"]["wait_us"].get(str(sender.rank))
        sent = sender.operations.get(key)
        if wait is not None and sent is not None:
            yield sent[0], begun + wait


def clock_offsets(traces: Sequence[_Trace]) -> dict[str, float]:
    """Returns the microseconds to add to each clock for the time of the clock of the first trace."""
    clocks: dict[str, list[_Trace]] = defaultdict(list)
    for trace in traces:
        clocks[trace.clock].append(trace)
    first = traces[0].clock
    wall = {clock: statistics.median(trace.wall for trace in its) for clock, its in clocks.items()}
    offsets = {clock: wall[clock] - wall[first] for clock in clocks}
    # Continues from known clocks to others along the tightest bounds.
    known: set[str] = set()
    queue = [(0.0, first, 0.0)]
    while queue:
        width, clock, offset = heapq.heappop(queue)
        if clock in known:
            continue
        known.add(clock)
        offsets[clock] = offset
        for other in clocks.keys() - known:
            if (bounds := _bounds_between(clocks[clock], clocks[other])) is not None:
                low, high = bounds
                heapq.heappush(queue, (max(width, abs(high - low)), other, offset + (low + high) / 2))
    return offsets


def _bounds_between(ones: Iterable[_Trace], others: Sequence[_Trace]) -> tuple[float, float] | None:
    """Returns what the others' clock is at least and at most behind the ones'; None if messages do not bound it."""
    pairs = [(one, other) for one in ones for other in others]
    lower = [sent - came for one, other in pairs for sent, came in _messages(one, other)]
    upper = [came - sent for one, other in pairs for sent, came in _messages(other, one)]
    return (max(lower), min(upper)) if lower and upper else None


def _write(traces: Sequence[_Trace], offsets: dict[str, float], output: Path) -> None:
    by_rank = {trace.rank: trace for trace in traces}
    begin = min(
        (event["ts"] + offsets[trace.clock] for trace in traces for event in trace.events if "ts" in event),
        default=0.0,
    )

    def shifted(trace: _Trace, time: float) -> float:
        return round(time + offsets[trace.clock] - begin, 3)

    def shown() -> Iterator[Event]:
        arrows = itertools.count(1)
        for trace in traces:
            for event in trace.events:
                if event["name"] not in ("fog_timeline", "fog_dropped"):
                    yield {**event, "ts": shifted(trace, event["ts"])} if "ts" in event else event
            for key, (begun, event) in trace.operations.items():
                waits = event["args"]["wait_us"]
                last = max(waits, key=lambda rank: float(waits[rank]), default=-1)
                sender = by_rank.get(int(last))
                if sender is None or (sent := sender.operations.get(key)) is None:
                    continue
                common = {"name": "message", "cat": "message", "id": next(arrows)}
                start, came = shifted(sender, sent[0]), shifted(trace, begun + waits[last])
                yield {**common, "ph": "s", "pid": sender.rank, "tid": sent[1]["tid"], "ts": start}
                yield {**common, "ph": "f", "bp": "e", "pid": trace.rank, "tid": event["tid"], "ts": came}

    with output.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        file.write(",\n".join(map(json.dumps, shown())))
        file.write("\n]}\n")
