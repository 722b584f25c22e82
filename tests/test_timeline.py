"""Tests of the timeline: the file of each rank, and the merged file."""

from __future__ import annotations

import json
import random
import resource
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist import timeline
from fogdist.bluefog import torch as bf
from fogdist.observe.merging import merge

Event = dict[str, Any]

# The keys that each kind of event has in the Trace Event Format, which https://ui.perfetto.dev reads.
KEYS = {
    "X": {"ts", "dur", "tid", "cat"},
    "M": {"args"},
    "s": {"ts", "tid", "id", "cat"},
    "f": {"ts", "tid", "id", "cat", "bp"},
}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def checked(path: Path) -> list[Event]:
    """Returns the events of a merged file; checks that they follow the format and that slices nest on each track."""
    document = json.loads(path.read_text())
    assert document.get("displayTimeUnit", "ms") in ("ms", "ns")
    events: list[Event] = document["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        assert {"name", "pid"} | KEYS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int), event
        assert min(event.get(key, 0) for key in ("pid", "tid", "ts", "dur")) >= 0, event
        assert event["ph"] != "M" or event["name"] in METADATA, event
        assert event.get("bp", "e") == "e" and isinstance(event.get("args", {}), dict), event
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        open_until = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-3, event
            open_until.append(end)
    return events


def slices(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["name"] == name]


def many_small(number: int) -> None:
    for round in range(200):
        bf.allreduce(torch.ones(1), name=f"thread {number} round {round}")


def everything() -> None:
    fogdist.init()
    assert timeline.is_on()
    with pytest.raises(ValueError, match="there is a timeline already"):
        timeline.start("another")
    rank, size = fogdist.rank(), fogdist.size()
    large = torch.full((1 << 20,), float(rank))
    for _ in range(3):
        fogdist.neighbor_allreduce(large)
    handles = [bf.neighbor_allreduce_nonblocking(large, name=f"layer {number}") for number in range(4)]
    for handle in handles:
        bf.wait(handle)
    window = fogdist.Window(torch.ones(1000), zero_init=True)
    window.put(torch.ones(1000))
    dist.barrier()
    window.update()
    window.free()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = bf.DistributedAdaptWithCombineOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert bf.timeline_start_activity('my "tensor"', "outer") and bf.timeline_start_activity(
        'my "tensor"', "inner"
    )
    assert bf.timeline_end_activity('my "tensor"') and bf.timeline_end_activity('my "tensor"')
    assert not bf.timeline_end_activity('my "tensor"')
    with bf.timeline_context("loading\n", "batch"):
        pass
    with bf.timeline_context("odd \u2028\x85 \ud800", "name"):
        pass
    with pytest.raises(TypeError, match="tensor_name must be a str"), bf.timeline_context(3, "name"):
        pass
    # Threads wait for the engine's lock; their slices must not cross.
    threads = [threading.Thread(target=many_small, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if size > 1:
        other = (rank + 1) % size
        work = dist.isend(torch.ones(1), other)
        dist.recv(torch.ones(1), (rank - 1) % size)
        work.wait()
    timeline.stop()
    timeline.stop()  # the second call does nothing
    assert not timeline.is_on() and not bf.timeline_start_activity("x", "y")
    bf.allreduce(large)  # this operation is in no timeline
    fogdist.shutdown()


@pytest.mark.parametrize("variable", ["FOG_TIMELINE", "BLUEFOG_TIMELINE"])
def test_a_training_in_the_timeline(new_world, tmp_path, variable):
    size = 3
    prefix = tmp_path / "trace_"
    new_world(size, environment={variable: str(prefix)}).run(everything)
    output = tmp_path / "merged.json"
    assert merge(prefix, output) == size
    events = checked(output)
    for rank in range(size):
        own = [event for event in events if event["pid"] == rank]
        count = {name: len(slices(own, name)) for name in {event["name"] for event in own}}
        assert count["neighbor_allreduce"] >= 3 + 4 and count["combined"] >= 3 + 4
        assert count["Window.put"] == 1 and count["Window.update"] == 1 and count["send/recv"] == 2
        assert count["forward"] == 2 and count["gradient"] == 2 and count["step"] == 2
        # The wait for an exchange belongs to the step, not to the gradients before it.
        for gradient, waiting in zip(slices(own, "gradient"), slices(own, "end of an exchange"), strict=True):
            assert gradient["ts"] + gradient["dur"] <= waiting["ts"]
        assert count["begin of an exchange"] == 2 and count["end of an exchange"] == 2
        assert count["outer"] == count["inner"] == count["batch"] == 1
        assert count["allreduce"] == 600  # the operation after stop() is not in it
        names = {event["args"]["name"] for event in own if event["name"] in ("process_name", "thread_name")}
        assert {"operations 0", "passes", "training", 'my "tensor"', "loading\n"} <= names
        # Waits show all ranks' messages, by numbers of the world.
        first = slices(own, "neighbor_allreduce")[0]["args"]
        assert first["what"] == "neighbor_allreduce(float32[1048576])" and first["wait_us"]
        assert set(first["wait_us"]) <= {str(other) for other in range(size) if other != rank}
        (put,) = slices(own, "Window.put")
        assert put["args"]["bytes"] == 4000 * len(put["args"]["ranks"])
    # No message arrives before it was sent, and the last one of each operation has an arrow.
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event["ts"]
    assert len(arrows) >= size * (3 + 4)
    assert all(arrow["s"] <= arrow["f"] for arrow in arrows.values())


def alone() -> str:
    fogdist.init()
    with pytest.raises(TypeError, match="prefix must be a str"):
        timeline.start(3)
    Path("linked_0.json").symlink_to("elsewhere")  # made by somebody who guesses names
    for prefix, why in (("no/folder/", "No such file"), ("linked_", "Too many levels of symbolic links")):
        with pytest.raises(ValueError, match=rf"{prefix}0\.json' cannot be written: {why}"):
            timeline.start(prefix)
    assert not Path("elsewhere").exists()
    return timeline.start(f"{Path.cwd()}/alone_")


def test_start_and_stop(new_world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        timeline.start("x")
    world = new_world(1)
    (path,) = world.run(alone)
    world.close()  # completes the file
    assert merge([path], tmp_path / "merged.json") == 1
    checked(tmp_path / "merged.json")


def started_in_vain() -> None:
    with pytest.raises(ValueError, match=r"no/folder/\d\.json' cannot be written"):
        fogdist.init()


def test_a_prefix_that_cannot_be_written(new_world):
    new_world(2, initialize=False, environment={"FOG_TIMELINE": "no/folder/"}).run(started_in_vain)


def full_disk(prefix: str) -> bool:
    fogdist.init()
    path = Path(timeline.start(prefix))
    limit = path.stat().st_size + 20_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        for _ in range(400):
            bf.allreduce(torch.ones(1))
        timeline.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert bf.allreduce(torch.ones(1)).item() == 1.0
    return path.stat().st_size <= limit


def test_a_full_disk_ends_the_timeline_and_not_the_program(new_world, tmp_path):
    world = new_world(2)
    assert world.run(full_disk, str(tmp_path / "full")) == [True, True]
    # the files are complete up to the point where the disk was full
    assert merge(tmp_path / "full", tmp_path / "merged.json") == 2
    checked(tmp_path / "merged.json")


# --- clocks ---------------------------------------------------------------------------------------------------


def operation(key: int, begun: float, end: float, waits: dict[int, float]) -> Event:
    arguments = {"group": "0", "number": key, "what": "barrier", "key": str(key), "queued_us": 0.0}
    arguments["wait_us"] = {str(rank): wait for rank, wait in waits.items()}
    return {
        "name": "barrier",
        "cat": "operation",
        "ph": "X",
        "tid": 0,
        "ts": begun,
        "dur": end - begun,
        "args": arguments,
    }


def write_trace(path: Path, rank: int, clock: str, wall: float, events: list[Event]) -> None:
    about = {"rank": rank, "size": 4, "host": clock, "clock": clock, "wall_clock_ns_at_zero": wall * 1e3}
    lines = [{"name": "fog_timeline", "ph": "M", "pid": rank, "args": about}]
    lines += [{**event, "pid": rank} for event in events]
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines) + "\n]\n")


def test_clocks_are_aligned_by_messages(tmp_path):
    """Four ranks are on two hosts whose clocks differ by 3 s; messages take 50 us or more."""
    rng = random.Random(1)
    skew = -7e8

    def of_rank(rank: int, time: float) -> float:
        return time if rank < 2 else time + skew

    events: dict[int, list[Event]] = {rank: [] for rank in range(4)}
    truth: dict[tuple[int, int], float] = {}
    for key in range(6000):
        begun = {rank: 1e9 + key * 1e4 + rng.uniform(0, 2e3) for rank in range(4)}
        for rank in range(4):
            arrivals = {
                peer: max(begun[rank], begun[peer] + 50 + rng.expovariate(1 / 300))
                for peer in range(4)
                if peer != rank
            }
            waits = {peer: time - begun[rank] for peer, time in arrivals.items()}
            end = max(arrivals.values()) + 5
            truth[rank, key] = begun[rank]
            events[rank].append(operation(key, of_rank(rank, begun[rank]), of_rank(rank, end), waits))
    for rank in range(4):
        wall = 1e15 if rank < 2 else 1e15 - skew + 3e6
        write_trace(tmp_path / f"t{rank}.json", rank, "ab"[rank // 2], wall, events[rank])
    merge(tmp_path / "t", tmp_path / "merged.json")
    merged = checked(tmp_path / "merged.json")
    first = truth[0, 0] - next(
        e["ts"] for e in merged if e["ph"] == "X" and e["pid"] == 0 and e["args"]["key"] == "0"
    )
    errors = [abs(e["ts"] + first - truth[e["pid"], int(e["args"]["key"])]) for e in merged if e["ph"] == "X"]
    assert max(errors) < 30  # in us
    arrows = defaultdict(dict)
    for event in merged:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event["ts"]
    assert arrows and all(arrow["s"] <= arrow["f"] + 20 for arrow in arrows.values())


def test_hosts_that_exchange_nothing_keep_their_wall_clocks(tmp_path):
    write_trace(tmp_path / "t0.json", 0, "a", 1e15, [operation(0, 100.0, 110.0, {})])
    write_trace(tmp_path / "t1.json", 1, "b", 1e15 + 5e6, [operation(1, 100.0, 110.0, {})])
    merge([tmp_path / "t0.json", tmp_path / "t1.json"], tmp_path / "merged.json")
    times = [event["ts"] for event in checked(tmp_path / "merged.json") if event["ph"] == "X"]
    assert times == [0.0, 5e6]


# --- files ----------------------------------------------------------------------------------------------------


def test_a_file_whose_rank_was_killed(tmp_path):
    write_trace(
        tmp_path / "t0.json",
        0,
        "a",
        0.0,
        [operation(key, key * 10.0, key * 10.0 + 5, {}) for key in range(5)],
    )
    whole = (tmp_path / "t0.json").read_text()
    (tmp_path / "t0.json").write_text(whole[: whole.index('"key": "4"')])
    merge(tmp_path / "t", tmp_path / "merged.json")
    assert len(slices(checked(tmp_path / "merged.json"), "barrier")) == 4


def test_files_that_cannot_be_merged(tmp_path):
    good = tmp_path / "t0.json"
    write_trace(good, 0, "a", 0.0, [operation(0, 0.0, 5.0, {}), operation(1, 10.0, 15.0, {})])
    with pytest.raises(ValueError, match=r"no file .*nothing<rank>\.json"):
        merge(tmp_path / "nothing", tmp_path / "merged.json")
    with pytest.raises(ValueError, match="at least one file"):
        merge([], tmp_path / "merged.json")
    with pytest.raises(ValueError, match="both of rank 0"):
        merge([good, good], tmp_path / "merged.json")
    other = tmp_path / "other.json"
    for text, message in [
        ('[{"name": "x", "ph": "M"}]', r"other\.json, line 1 is no event"),
        ('{"name": "x", "ph": "M"}', r"other\.json is not a timeline of fog"),
        (good.read_text().replace('"ts": 10.0', '"ts": 1e30'), r"1e\+30 is no time"),
    ]:
        other.write_text(text)
        with pytest.raises(ValueError, match=message):
            merge([other], tmp_path / "merged.json")
    lines = good.read_text().splitlines()
    good.write_text("\n".join([*lines[:2], lines[2][:20], *lines[3:]]))
    with pytest.raises(ValueError, match=r"t0\.json, line 3"):
        merge([good], tmp_path / "merged.json")
    with pytest.raises(FileNotFoundError):
        merge([tmp_path / "absent.json"], tmp_path / "merged.json")
    assert not (tmp_path / "merged.json").exists()
