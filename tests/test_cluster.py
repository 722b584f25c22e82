"""The emulated clusters of benchmarks/cluster.py, links.py and link_traces.py: hosts, dilation, and short runs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import emulated_hosts
from scripts import ROOT, Job, run_script, started

# Modules of the benchmarks, which `hosts` makes importable.
emulation, workloads = (importlib.import_module(name) for name in ("emulated_hosts", "workloads"))

BENCHMARKS = ROOT / "benchmarks"
SHORT = ["--rounds", "1", "--steps", "1", "--compute", "0.1"]
WAYS = ["one-peer", "ring", "allreduce", "gloo", "sockets one-peer", "sockets one-peer, asked"]
WAYS += ["sockets ring"]
RECEIVE = """
import socket
server = socket.create_server(("{address}", 5000))
print("ready", flush=True)
connection = server.accept()[0]
print(sum(iter(lambda: len(connection.recv(65536)), 0)))
"""
MAKE_HOSTS = """
import subprocess
from emulated_hosts import emulated_hosts, inside
with emulated_hosts(2, "1gbit") as names:
    process = subprocess.Popen([*inside(names[0]), "sleep", "300"])
    print(*names, process.pid, flush=True)
    input()
"""


@pytest.mark.parametrize("name", list(workloads.SCENARIOS))
@pytest.mark.parametrize("cap_mb", [workloads.DDP_CAP_MB, workloads.FOG_CAP_MB])
def test_dilation_keeps_the_ratio_of_each_bucket(name: str, cap_mb: float) -> None:
    scenario = workloads.SCENARIOS[name]
    sizes = workloads.MODELS[scenario.model].sizes
    seconds = 0.6
    dilation = workloads.emulated(scenario, seconds)
    small = workloads.sizes_of(workloads.MODELS[scenario.model], dilation)
    buckets = workloads.ddp_buckets(sizes, cap_mb)
    # The cap of small buckets may divide them otherwise by the rounding of a parameter; here it does not.
    assert workloads.ddp_buckets(small, dilation.cap_mb(cap_mb)) == buckets
    real = workloads.bucket_bytes(sizes, buckets)
    emulated = workloads.bucket_bytes(small, buckets)
    assert sum(real) == 4 * sum(sizes)
    for b, e, bucket in zip(real, emulated, buckets, strict=True):
        ratio = 8 * b / scenario.rate / scenario.compute
        rounding = 4 * len(bucket) / e  # at most one element of each parameter
        assert 8 * e / dilation.rate(scenario.rate) / seconds == pytest.approx(ratio, rel=rounding)


def test_models_have_the_published_numbers_of_parameters() -> None:
    resnet, gpt = workloads.MODELS["resnet50"], workloads.MODELS["gpt2"]
    assert (len(resnet.sizes), sum(resnet.sizes)) == (161, 25_557_032)
    assert (len(gpt.sizes), sum(gpt.sizes)) == (148, 124_439_808)
    assert sum(resnet.shares) == pytest.approx(1)


def run_cluster(directory: Path, *options: str) -> dict[str, Any]:
    """Returns what a run of the program wrote; skips where hosts cannot be emulated."""
    with emulated_hosts(1, "1gbit"):
        pass
    numbers = directory / "cluster.json"
    command = [BENCHMARKS / "cluster.py", *options, *SHORT, "--json", numbers]
    run_script(command, 1, directory / "log", [sys.executable])
    result: dict[str, Any] = json.loads(numbers.read_text())
    return result


def check_point(point: dict[str, Any], sent: float) -> None:
    """Checks one point; `sent` is the part of the parameters that a host sends in a step."""
    parameters = 4 * sum(
        workloads.sizes_of(workloads.MODELS[point["model"]], workloads.Dilation(**point["dilation"]))
    )
    if point["way"] == "none":
        assert point["wire_bytes_per_host_per_step"] < 0.01 * parameters
        return
    size = sum(point["bucket_bytes"])
    assert parameters <= size <= 1.01 * parameters  # those of fog are aligned
    # Frames have headers, and TCP acknowledges.
    assert sent <= point["wire_bytes_per_host_per_step"] / parameters <= 1.2 * sent
    assert 0 < point["efficiency"] <= 1.5
    assert point["step_s"]["median"] >= point["compute_s"]
    assert 0 <= point["cpu_idle"] <= 1


def test_two_hosts(tmp_path: Path) -> None:
    ways = ["ddp_gloo", "one_peer_exp", "gossip_diloco"]
    written = run_cluster(tmp_path, "--scenarios", "a", "--hosts", "2", "--ways", *ways, "--seed", "3")
    points = {point["way"]: point for point in written["points"]}
    assert set(points) == {"none", *ways} and not written["failures"]
    for point in points.values():
        # A ring all-reduce of two sends half of the tensor twice; one peer gets all of it once.
        check_point(point, 1 / point["local_steps"])
    assert points["gossip_diloco"]["local_steps"] == 8


def test_four_hosts_with_a_slow_link(tmp_path: Path) -> None:
    ways = ["one_peer_exp", "async_win"]
    written = run_cluster(tmp_path, "--scenarios", "slow link", "--hosts", "4", "--ways", *ways)
    points = {point["way"]: point for point in written["points"]}
    assert set(points) == {"none", *ways}
    point = points["one_peer_exp"]
    check_point(point, 1.0)
    # The slow link needs more than the compute for one exchange, and all wait for it.
    link = 8 * sum(point["bucket_bytes"]) / (0.1 * point["rate_bits_per_s"])
    assert link > point["compute_s"] and point["step_s"]["median"] > 0.9 * link


def test_links_carry_what_each_way_must_send(tmp_path: Path) -> None:
    with emulated_hosts(1, "1gbit"):
        pass
    numbers = tmp_path / "links.json"
    options = ["--world", "3", "1gbit", "2x96K", "--turns", "2", "--seconds", "0.02", "--ways", *WAYS]
    command = [BENCHMARKS / "links.py", *options, "--json", numbers]
    printed = run_script(command, 1, tmp_path / "log", [sys.executable])
    points = {point["way"]: point for point in json.loads(numbers.read_text())["points"]}
    assert list(points) == WAYS
    for way, point in points.items():
        assert 1 < point["sent"] < 1.3, (way, point)  # frames have headers, and TCP acknowledges
    assert "one peer a step / best allreduce" in printed


def test_training_along_traces_of_link_rates(tmp_path: Path) -> None:
    with emulated_hosts(1, "1gbit"):
        pass
    numbers = tmp_path / "traces.json"
    options = ["--parts", "traces", "--traces", "1", "--ways", "tune", "--seconds", "1", "--compute", "0.02"]
    command = [BENCHMARKS / "link_traces.py", *options, "--json", numbers]
    run_script(command, 1, tmp_path / "log", [sys.executable])
    written = json.loads(numbers.read_text())
    (point,) = written["points"]
    assert 0 < point["share"] < 1.5 and point["settings"][0]["time"] == 0
    distances = written["course"]["distances"]
    assert len(distances) == point["steps"] and max(distances) > 0


def test_traces_are_those_of_their_seeds() -> None:
    program = importlib.import_module("link_traces")
    for number in program.NUMBERS:
        kept = json.loads((program.TRACES / f"{number}.json").read_text())
        assert kept == {"seed": number, "changes": program.make_trace(number, program.SECONDS)}
        rates = [rate for _, rate in kept["changes"]]
        assert len(rates) > 1 and all(20 <= rate <= 1000 for rate in rates)


def test_two_centers_reach_each_other_and_count_bytes() -> None:
    with emulated_hosts(1, "1gbit"):
        pass
    with emulation.emulated_hosts(4, "1gbit", centers=2, between="100mbit") as names:
        before = emulation.traffic(names)
        address = emulation.address(3)
        receive = RECEIVE.format(address=address)
        send = f"import socket; socket.create_connection(('{address}', 5000)).sendall(bytes(1 << 20))"
        with subprocess.Popen(
            [*emulation.inside(names[3]), sys.executable, "-c", receive], stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            subprocess.run([*emulation.inside(names[0]), sys.executable, "-c", send], check=True, timeout=30)
            assert int(receiver.stdout.read()) == 1 << 20
        after = emulation.traffic(names)
    assert (1 << 20) <= after[0][0] - before[0][0] <= 1.2 * (1 << 20)  # host 0 has sent it
    assert (1 << 20) <= after[3][1] - before[3][1] <= 1.2 * (1 << 20)  # host 3 has received it
    assert after[1][0] - before[1][0] < 10_000


def test_hosts_of_a_killed_program_are_removed() -> None:
    with emulated_hosts(1, "1gbit"):
        pass
    with subprocess.Popen(
        [sys.executable, "-c", MAKE_HOSTS],
        cwd=BENCHMARKS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        *names, pid = process.stdout.readline().split()
        assert len(names) == 2
        assert not set(names) & set(emulation.remove_leftovers())  # its program lives
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        removed = emulation.remove_leftovers()
    assert set(names) <= set(removed) and len(removed) >= 3  # and the bridge's namespace
    assert not any(Path("/run/netns", name).exists() for name in removed)
    # What ran in them was killed; init may not have reaped it yet.
    state = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.05)


def test_a_terminated_program_removes_its_hosts(tmp_path: Path) -> None:
    with emulated_hosts(1, "1gbit"):
        pass
    command = [BENCHMARKS / "cluster.py", "--scenarios", "a", "--hosts", "2", "--rounds", "1000"]
    with started([Job(command, 1, tmp_path / "log", [sys.executable])]) as (job,):
        job.wait_for(lambda output: "turn 1 of" in output, 60)
        assert any(f"fog-{job.pid}-" in path.name for path in Path("/run/netns").iterdir())
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(30) == 128 + signal.SIGTERM, job.output
    assert not any(f"fog-{job.pid}-" in path.name for path in Path("/run/netns").iterdir())
