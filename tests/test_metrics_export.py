"""Tests of fogdist.metrics.Exporter: what it costs when off, its three ways out, its values, and the dashboard."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist.observe.export import METRICS, Exporter, Metric
from fogdist.topology import ring

DASHBOARD = Path(__file__).parents[1] / "docs" / "dashboard.json"
FIRST = (
    20000 + os.getpid() % 9000
)  # the port of rank 0; the system gives these ports to nobody that asks for any


def sample_of(metric: Metric) -> str:
    return metric.prometheus_name + "_total" * metric.is_counter


SAMPLES = {sample_of(metric): metric for metric in METRICS}


def samples(text: str, parser: Any = None) -> dict[tuple[str, ...], float]:
    """Returns the samples by name, and the values of their labels but for the rank, in the order of the labels' names."""
    from prometheus_client.openmetrics import parser as openmetrics

    found = {}
    for family in (parser or openmetrics).text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            assert sorted(labels) == sorted(("rank", *SAMPLES[name].labels))
            found[(name, *(labels[label] for label in sorted(labels) if label != "rank"))] = value
    return found


def scrape(port: int) -> dict[tuple[str, ...], float]:
    accept = {"Accept": "application/openmetrics-text"}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}", headers=accept)) as answer:
        return samples(answer.read().decode())


def traffic() -> dict[int, Any]:
    return fogdist.context.current().backend.traffic


def off() -> None:
    threads = threading.active_count()
    fogdist.init(lambda size: ring(size, connect_style=2))  # each rank sends to the next one
    fogdist.neighbor_allreduce(torch.ones(1000))
    assert not {"prometheus_client", "opentelemetry"} & {name.partition(".")[0] for name in sys.modules}
    assert threading.active_count() == threads and traffic() == {}


def on_a_port(first: int) -> None:
    rank, after, before = fogdist.rank(), str((fogdist.rank() + 1) % 3), str((fogdist.rank() - 1) % 3)
    with Exporter(port=first) as exporter:
        assert exporter.port == first + rank
        begin = scrape(exporter.port)
        for _ in range(5):
            time.sleep(0.1 if rank == 0 else 0.0)
            fogdist.neighbor_allreduce(torch.ones(1000))
            fogdist.flight_record.count_step()
        now = scrape(exporter.port)
        grown = {key: value - begin.get(key, 0) for key, value in now.items()}
        assert grown["fog_steps_total",] == grown["fog_operations_total",] == 5
        assert now["fog_link_io_bytes_total", "transmit", after] == 5 * 4000
        assert now["fog_link_io_bytes_total", "receive", before] == 5 * 4000
        assert now["fog_operation_failures_total",] == now["fog_membership_epoch",] == 0
        assert rank != 1 or grown["fog_wait_time_seconds_total", "0"] > 0.1
        assert ("fog_consensus_distance",) not in now
        fogdist.consensus_distance(torch.full((1,), float(rank)))
        assert scrape(exporter.port)["fog_consensus_distance",] == pytest.approx((2 / 3) ** 0.5)
        # The peers of another group have their ranks of the job, and its bytes stay when it has ended.
        group = dist.new_group([1, 2], backend="fog")
        if rank:
            sent = ("fog_link_io_bytes_total", "transmit", str(3 - rank))
            bytes_before = scrape(exporter.port).get(sent, 0)
            fogdist.pair_gossip(torch.ones(250), 2 - rank, group=group)
            assert scrape(exporter.port)[sent] == bytes_before + 1000
            dist.destroy_process_group(group)
            assert scrape(exporter.port)[sent] == bytes_before + 1000
        with pytest.raises(ValueError, match=rf"port must be free on 0\.0\.0\.0, got {exporter.port}: "):
            Exporter(port=first)
        with pytest.raises(RuntimeError, match="file="):
            exporter.write()
    with pytest.raises(OSError):
        scrape(first + rank)
    counted = traffic()
    fogdist.neighbor_allreduce(torch.ones(1000))
    assert traffic() == counted


def in_a_file(folder: Path) -> None:
    from prometheus_client import parser

    with pytest.raises(ValueError, match="file must be one that can be written"):
        Exporter(file=folder / "none" / "fog_")
    exporter = Exporter(file=f"{folder}/fog_")
    path = folder / f"fog_{fogdist.rank()}.prom"
    begin = samples(path.read_text(), parser)
    fogdist.flight_record.count_step()
    exporter.write()
    assert samples(path.read_text(), parser)["fog_steps_total",] == begin["fog_steps_total",] + 1
    dist.barrier()
    assert len(list(folder.iterdir())) == fogdist.size()  # nothing of how they were written
    dist.barrier()
    exporter.close()
    assert exporter.path == path and not path.exists()
    with pytest.raises(RuntimeError, match="closed"):
        exporter.write()


def by_opentelemetry() -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    with Exporter(opentelemetry=True), Exporter(port=0) as other:
        fogdist.neighbor_allreduce(torch.ones(1000))
        found = {}
        for each in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
            metric = next(metric for metric in METRICS if metric.name == each.name)
            assert (each.unit, each.description) == (metric.unit, metric.description)
            assert getattr(each.data, "is_monotonic", False) == metric.is_counter
            for point in each.data.data_points:
                labels = dict(point.attributes)
                assert labels.pop("rank") == str(fogdist.rank())
                found[(sample_of(metric), *(labels[name] for name in sorted(labels)))] = point.value
        assert found == scrape(other.port)
    fogdist.shutdown()


def test_off_and_the_three_ways_out(new_world, tmp_path):
    world = new_world(3)
    world.run(off)
    world.run(on_a_port, FIRST)
    world.run(in_a_file, tmp_path)
    world.run(by_opentelemetry)


def with_a_child(first: int) -> int:
    """Serves a port, also when a forked process outlives this rank, and returns that process."""
    fogdist.init()
    Exporter(port=first)
    fogdist.neighbor_allreduce(torch.ones(1))
    if child := os.fork():
        return child
    os.setpgid(0, 0)  # so that the kill of the rank spares it
    time.sleep(20)
    os._exit(0)


def test_a_killed_rank_leaves_no_port_and_others_show_it_as_lost(new_world):
    world = new_world(2)
    children = world.run(with_a_child, FIRST + 3)
    try:
        assert scrape(FIRST + 3)["fog_peer_lost", "1"] == 0 and scrape(FIRST + 4)
        world.kill(1)
        end = time.monotonic() + 5
        while scrape(FIRST + 3)["fog_peer_lost", "1"] == 0 and time.monotonic() < end:
            time.sleep(0.05)
        assert scrape(FIRST + 3)["fog_peer_lost", "1"] == 1
        socket.create_server(("", FIRST + 4)).close()  # the port is free
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"fogdist\.init\(\)"):
        Exporter(port=9400)
    fogdist.init()
    sys.modules["prometheus_client"] = sys.modules["opentelemetry.metrics"] = None  # as if they were missing
    threads = threading.active_count()
    for error, text, arguments in [
        (TypeError, "port must be an int, got str", {"port": "9400"}),
        (TypeError, "port must be an int, got bool", {"port": True}),
        (ValueError, "port must be from 0 to 65535, got 65536", {"port": 65536}),
        (ValueError, "port must be from 0 to 65535, got -1", {"port": -1}),
        (TypeError, "address must be a str, got int", {"port": 1, "address": 7}),
        (TypeError, "file must be a str or a path, got int", {"file": 3}),
        (TypeError, "opentelemetry must be a bool, got int", {"opentelemetry": 1}),
        (ValueError, "one of port, file and opentelemetry must be given, got none", {}),
        (ValueError, "must be given, got port and file", {"port": 1, "file": "x"}),
        (ValueError, "must be given, got file and opentelemetry", {"file": "x", "opentelemetry": True}),
        (ImportError, "port needs the package prometheus_client", {"port": 0}),
        (ImportError, "file needs the package prometheus_client", {"file": "x"}),
        (ImportError, "opentelemetry needs the package opentelemetry-api", {"opentelemetry": True}),
    ]:
        with pytest.raises(error, match=re.escape(text)):
            Exporter(**arguments)
    fogdist.neighbor_allreduce(torch.ones(1))
    assert threading.active_count() == threads and traffic() == {}


def test_bad_arguments_start_nothing(new_world):
    new_world(2).run(bad_arguments)


def test_the_dashboard_asks_for_each_metric_and_for_nothing_else():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"fog_\w+", query)} == set(SAMPLES)
    for query in queries:
        (name,) = re.findall(r"fog_\w+", query)
        assert {*re.findall(r"(\w+)=", query)} <= {"job", "rank", *SAMPLES[name].labels}, query
