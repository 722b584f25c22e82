"""`fog advise`: its model and its rule against cases computed by hand, and short runs of the command."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fog_cli
import pytest
import torch
from fog_cli.commands import advise as command
from fog_cli.programs import advise_ranks
from fogdist.tuning import decision
from fogdist.tuning.decision import Setting, best, decide, settings
from fogdist.tuning.network import Network
from fogdist.tuning.prediction import Codec, Traffic, Way, exchange_seconds, ways
from forked_programs import ForkedJob
from hosts import emulated_hosts, run_on_hosts
from scripts import ROOT, started

MB = 2**20


def flat(hosts: int, rate: float, latency: float = 1e-4) -> Network:
    """Hosts of one rank, each with a link of that rate."""
    return Network(range(hosts), [0] * hosts, latency, latency, [rate] * hosts, [math.inf] * hosts, {}, 1e15)


def two_sites(hosts: int, rate: float, trunk: float) -> Network:
    """The same, half of them in each of two sites."""
    sites = [2 * host // hosts for host in range(hosts)]
    trunks = {(0, 1): trunk, (1, 0): trunk}
    return Network(range(hosts), sites, 1e-4, 1e-4, [rate] * hosts, [math.inf] * hosts, trunks, 1e15)


def chosen(network: Network, compute: float, size: float, tolerance: float = 0.05) -> Setting:
    return best(settings(network, compute, size), compute, tolerance)


# --- the model ----------------------------------------------------------------------------------------------


def test_exchange_by_hand() -> None:
    network = Network(
        [0, 0, 1, 1], [0, 1], 1e-3, 1e-6, [100.0, 50.0], [1000.0, 500.0], {(0, 1): 40.0, (1, 0): 80.0}, 200.0
    )
    # 3 buckets of at most 40 bytes, 2 messages each; host 1 receives 2 tensors of 100 bytes at 50 bytes/s, in 4 s, and
    # the link to its site carries them in 5 s; the last bucket is summed with two others in 40 * 3 / 200 s.
    seconds = exchange_seconds(Traffic({(0, 1): 2.0}, {0: 1.0}, 2), network, 100.0, 40.0)
    assert seconds == pytest.approx(3 * 2 * 1e-3 + 5.0 + 0.6)
    # The other way: the site's link is faster than the host's, which sends.
    seconds = exchange_seconds(Traffic({(1, 0): 2.0}, {}, 1), network, 100.0, 1000.0)
    assert seconds == pytest.approx(1e-3 + 4.0 + 1.0)
    # Within a host the other latency counts: 100 * 3 / 500.
    seconds = exchange_seconds(Traffic({}, {1: 3.0}, 1), network, 100.0, 10.0)
    assert seconds == pytest.approx(10 * 1e-6 + 0.6 + 0.1)


def test_step_is_compute_and_what_it_does_not_hide() -> None:
    way = Way("two rounds", "", 3, [Traffic({(0, 1): 1.0}, {}, 0), Traffic({(0, 1): 4.0}, {}, 0)])
    # Exchanges of 1 and 4 s beside 2 s of compute: 0 and 2 s are left, 1 s on average, in each second step.
    (found,) = settings(flat(2, 10.0), 2.0, 10.0, local_steps=[2], buckets_mb=[1.0], chosen=[way])
    assert found.exchange == pytest.approx(2.5)
    assert found.step == pytest.approx(2.5)
    assert found.agreement == pytest.approx(3 * 2 * 2.5)
    assert found.sent == pytest.approx(2.5 * 10 / 2)


def test_traffic_of_ways() -> None:
    network = Network([0, 0, 1, 1], [0, 0], 1e-3, 1e-6, [1.0] * 2, [1.0] * 2, {}, 1.0)
    found = {way.name: way for way in ways(network)}
    # 2 (H - 1) / H tensors leave each host, and its two ranks give each other what they have and get the sum.
    assert found["all-reduce"].traffic == [Traffic({(0, 1): 1.0, (1, 0): 1.0}, {0: 2.0, 1: 2.0}, 4)]
    # One tensor for both ranks; the exact average of all, as two hosts average with each other.
    assert found["hierarchical"].traffic == [Traffic({(0, 1): 1.0, (1, 0): 1.0}, {0: 2.0, 1: 2.0}, 3)]
    assert found["hierarchical"].rounds == found["all-reduce"].rounds == 1
    # Round 0: to the next rank; round 1: to the next but one, which is on the other host.
    first, second = found["one-peer-exp2"].traffic
    assert first == Traffic({(0, 1): 1.0, (1, 0): 1.0}, {0: 1.0, 1: 1.0}, 1)
    assert second == Traffic({(0, 1): 2.0, (1, 0): 2.0}, {}, 1)
    assert found["one-peer-exp2"].rounds == 2


# --- the rule -----------------------------------------------------------------------------------------------


def test_fast_links_give_dense_averages_in_each_step() -> None:
    choice = chosen(flat(8, 1e10), compute=0.1, size=1e8)
    # 1e8 bytes * 2 * 7/8 at 1e10 bytes/s are 17.5 ms.
    assert (choice.way.name, choice.local_steps) == ("all-reduce", 1)
    assert 0.0175 <= choice.exchange < 0.03 and choice.step == 0.1


def test_slower_links_give_one_peer_in_each_step() -> None:
    # A tensor takes 0.08 s, all-reduce 0.14 s and the exponential graph of 8 ranks 0.24 s, beside 0.1 s.
    choice = chosen(flat(8, 1.25e9), compute=0.1, size=1e8)
    assert choice.way.traffic[0].messages == 1 and choice.way.rounds == 3 and choice.local_steps == 1
    # All-reduce with 2 local steps would need 2 * 0.12 s, and is not allowed; 16 local steps are 1.6 s.
    # Who allows steps of 30 % more gets it: one round, of two steps of 0.12 s.
    assert chosen(flat(8, 1.25e9), 0.1, 1e8, tolerance=0.3).way.name == "all-reduce"


def test_a_slow_link_between_sites_gives_local_steps_or_few_crossings() -> None:
    network = two_sites(16, 1e10, 1e8)
    choice = chosen(network, compute=0.1, size=1e8)
    # One crossing takes 1 s, 10 steps: without local steps nothing stays near compute.
    assert choice.local_steps > 1
    assert choice.step <= 0.105
    # The inner and outer graph crosses with one rank of each site at a time; all-reduce as a ring does.
    crossings = {
        way.name: sum(
            each.between.get((a, b), 0) for each in way.traffic for a in range(8) for b in range(8, 16)
        )
        / len(way.traffic)
        for way in ways(network)
    }
    assert crossings["inner-outer-exp2"] == 1.0 and crossings["all-reduce"] == pytest.approx(2 * 15 / 16)


def test_where_nothing_is_near_compute_the_fastest_counts() -> None:
    network = flat(4, 1e6)
    found = settings(network, 0.1, 1e8, local_steps=[1, 2])
    choice = best(found, 0.1, 0.05)
    fastest = min(each.step for each in found)
    assert fastest > 10 and choice.step <= 1.05 * fastest and choice.local_steps == 2


# --- codecs -------------------------------------------------------------------------------------------------


def test_exchange_with_a_codec_by_hand() -> None:
    network = Network(
        [0, 0, 1, 1], [0, 1], 1e-3, 1e-6, [100.0, 50.0], [1000.0, 500.0], {(0, 1): 40.0, (1, 0): 80.0}, 200.0
    )
    traffic = Traffic({(0, 1): 2.0}, {0: 1.0}, 2)
    # A quarter of the 5 s of the link; 25 elements are encoded in 0.5 s and decoded twice in 0.5 s, a bucket of 10 in 0.4 s.
    fast = Codec.of(("c", 1.0, 50.0, 100.0), 4)
    seconds = exchange_seconds(traffic, network, 100.0, 40.0, fast)
    assert seconds == pytest.approx(3 * 2 * 1e-3 + 1.25 + 0.4)
    # A tenth of that speed: 10 s, longer than the link, and 4 s for the last bucket. A slice of half needs half of it.
    slow = Codec.of(("c", 1.0, 5.0, 10.0), 4)
    seconds = exchange_seconds(traffic, network, 100.0, 40.0, slow)
    assert seconds == pytest.approx(3 * 2 * 1e-3 + 10.0 + 4.0)
    seconds = exchange_seconds(traffic, network, 100.0, 40.0, slow, encoded=0.5)
    assert seconds == pytest.approx(3 * 2 * 1e-3 + 5.0 + 2.0)
    # Half of 2-byte elements' bytes, of which there are twice as many.
    seconds = exchange_seconds(traffic, network, 100.0, 40.0, Codec.of(("c", 1.0, 50.0, 100.0), 2))
    assert seconds == pytest.approx(3 * 2 * 1e-3 + 2.5 + 0.8)


INT8 = Codec.of(("Int8()", 1.016, 2.5e9, 3.7e9), 4)


@pytest.mark.parametrize(("rate", "pays"), [(1.25e8, True), (1.25e10, False)])
def test_compression_pays_on_slow_links_only(rate: float, pays: bool) -> None:
    network = flat(8, rate)
    found = best(settings(network, 0.18, 1e8, codec=INT8), 0.18, 0.05)
    plain = best(settings(network, 0.18, 1e8), 0.18, 0.05)
    assert decision.pays(found, plain) is pays and found.codec is INT8 and plain.codec is None
    assert (found.agreement < plain.agreement) is pays


def test_a_codec_is_not_for_all_reduce() -> None:
    found = settings(flat(4, 1e9), 0.1, 1e8, codec=INT8)
    assert "all-reduce" not in {each.way.name for each in found}


def test_code_that_can_be_pasted() -> None:
    """The lines run; only the constructors are replaced, which need ranks."""
    network = Network(
        [0, 0, 1, 1], [0, 1], 1e-3, 1e-6, [1e8] * 2, [1e10] * 2, {(0, 1): 1e7, (1, 0): 1e7}, 1e10
    )
    sparse = Codec.of(("TopK(0.045, bits=2)", 0.1, 1e9, 1e9), 4)
    decided = decide(network, [0.1], 1e8, {"Int8()": INT8, sparse.code: sparse})
    assert {each.method.name for each in decided.found} == {
        "DistributedDataParallel", "DecentralizedOptimizer", "DiLoCo", "SparseLoCo"
    }  # fmt: skip
    seen: list[dict[str, Any]] = []

    def made(*given: Any, **options: Any) -> None:
        assert given in (("optimizer", "model"), ("model",))
        seen.append(options)

    replaced = {"fogdist.DecentralizedOptimizer(": "made(", "fogdist.set_machine_topology(": "set("}
    replaced |= {f"fogdist.algorithms.{name}(": "made(" for name in ("DiLoCo", "SparseLoCo")}
    replaced |= {"= DistributedDataParallel(": "= made("}
    codes = set()
    for each in decided.found:
        lines = "\n".join(command.in_code(each))
        codes.add(each.way.code)
        for name, instead in replaced.items():
            lines = lines.replace(name, instead)
        exec(lines, {"made": made, "set": lambda graph: None, "optimizer": "optimizer", "model": "model"})
        if each.method is not decision.DDP:
            assert seen[-1]["local_steps"] == each.local_steps
            assert ("compression" in seen[-1]) == (each.codec is not None)
    assert (
        any(code.startswith("topology.by_sites([0, 0, 1, 1]") for code in codes)
        and "GlobalAverage()" in codes
    )


# --- the method ---------------------------------------------------------------------------------------------


CODECS = {
    each.code: each
    for each in (
        INT8,
        Codec.of(("TopK(0.045, bits=2)", 0.051, 3e8, 1e9), 4),
        Codec.of(("TopK(0.1, bits=2)", 0.1, 3e8, 1e9), 4),
        Codec.of(("TopK(0.02, bits=2)", 0.024, 3e8, 1e9), 4),
    )
}


@pytest.mark.parametrize(
    ("rate", "method", "steps"),
    [
        # A tensor of 100 MB takes 0.01 s, 0.1 s, 0.33 s, 1 s, 10 s and 100 s, beside 0.18 s of compute.
        (1e10, "DistributedDataParallel", 1),
        (1e9, "DecentralizedOptimizer", 1),
        (3e8, "DecentralizedOptimizer", 1),
        (1e8, "SparseLoCo", 4),
        (1e7, "SparseLoCo", 2),
        (1e6, "SparseLoCo", 100),
    ],
)
def test_method_by_rate(rate: float, method: str, steps: int) -> None:
    decided = decide(flat(8, rate), [0.1, 0.18], 1e8, CODECS)
    assert (decided.setting.method.name, decided.setting.local_steps) == (method, steps)
    assert (decided.setting.codec is INT8) == (rate == 3e8)
    assert "ms a step" in decided.reason and decided.loss and "\n" not in decided.reason + decided.loss
    plain_method = "DecentralizedOptimizer" if method == "SparseLoCo" else method
    # Without codecs, of which none is measured for parameters of a byte.
    plain = decide(flat(8, rate), [0.18], 1e8, {}).setting
    assert plain.method.name == ("DiLoCo" if rate <= 1e7 else plain_method) and plain.codec is None


def test_ddp_is_predicted_with_its_last_bucket() -> None:
    # All-reduce of 1e8 bytes: 0.175 s at 1e9 bytes/s, 0.12 s of it hidden; or the last bucket of 25 MiB alone.
    for compute, late in ((0.18, 0.175 - 0.12), (1.8, 0.175 * 25 * MB / 1e8)):
        ddp = decide(flat(8, 1e9), [compute], 1e8, {}).found[0]
        assert ddp.method is decision.DDP
        assert ddp.step == pytest.approx(compute + late, rel=0.05)


def test_fragments_that_are_applied_later() -> None:
    way = Way("one", "", 1, [Traffic({(0, 1): 1.0}, {}, 0)])
    options = {"local_steps": [4], "buckets_mb": [1.0], "chosen": [way], "method": decision.DILOCO}
    # 10 s for the whole, beside 2 s of compute: 10 s in 4 steps; or 5 s for each half, of which 2 or 6 s are hidden.
    for fragments, delay, step in ((1, 0, 2 + 10 / 4), (2, 1, 2 + 2 * 3 / 4), (2, 3, 2.0)):
        (found,) = settings(flat(2, 10.0), 2.0, 100.0, fragments=fragments, delay=delay, **options)
        assert found.step == pytest.approx(step) and (found.fragments, found.delay) == (fragments, delay)


def test_no_round_sends_all_tensors_of_a_site_over_its_line() -> None:
    for hosts in (4, 8, 12):
        network = two_sites(hosts, 1e10, 1e8)
        found = ways(network)
        assert {"by-sites", "all-reduce"} <= {each.name for each in found} and "exp2" not in {
            w.name for w in found
        }
        for way in found:
            for each in way.traffic:
                crossing = sum(
                    n for (a, b), n in each.between.items() if network.site_of[a] < network.site_of[b]
                )
                assert crossing <= (1.0 if way.name == "by-sites" else 2.0)
        # Each step is that of the ranks that cross; one crossing takes 1 s.
        decided = decide(network, [0.5], 1e8, {})
        assert decided.setting.step < 0.6


# --- what was measured --------------------------------------------------------------------------------------


def measured(hosts: int, seconds: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Transfers of 100 bytes between all hosts; those that are not named take a second."""
    transfers = [
        [distance, source, 100.0, seconds.get((source, (source + distance) % hosts), 1.0)]
        for distance in range(1, hosts)
        for source in range(hosts)
    ]
    about = {"latency_s": 1e-3, "latency_within_s": 1e-6, "local_rates": [0.0] * hosts, "sum_rate": 1e9}
    return {"host_of": list(range(hosts)), "transfers": transfers, **about}


def test_a_link_between_sites_is_found_with_its_rate() -> None:
    # A line of 50 bytes/s between hosts 0, 1 and 2, 3, shared by as many transfers as cross it at once, each way:
    # one at the distances 1 and 3, two at 2.
    crossing = {
        (a, b): (4.0 if (b - a) % 4 == 2 else 2.0) for a in range(4) for b in range(4) if a // 2 != b // 2
    }
    network = Network.of(measured(4, crossing))
    assert network.site_of == [0, 0, 1, 1]
    assert network.trunks == {(0, 1): 50.0, (1, 0): 50.0}
    assert network.host_rates == [100.0] * 4


def test_a_host_with_a_slow_link_is_a_site() -> None:
    network = Network.of(
        measured(4, {pair: 10.0 for pair in [(1, x) for x in range(4)] + [(x, 1) for x in range(4)]})
    )
    assert network.site_of == [0, 1, 0, 0]
    assert network.host_rates == [100.0, 10.0, 100.0, 100.0]
    assert network.trunks == {(0, 1): 10.0, (1, 0): 10.0}


def links_here() -> dict[str, Any]:
    """Measures on each rank what `fog advise` does."""
    import fogdist

    fogdist.init()
    found = advise_ranks.measure(0.1)
    fogdist.shutdown()
    return found


def test_a_rate_is_measured_beyond_the_burst_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, burst = 15e6 / 8, 70e3  # a link lets so much more pass at once after a pause

    def transfer(x: torch.Tensor, y: torch.Tensor, target: int | None, source: int | None) -> float:
        return max(1e-4, (y.nbytes - burst) / rate)

    alone = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(advise_ranks, "dist", alone)
    monkeypatch.setattr(advise_ranks, "_transfer", transfer)
    monkeypatch.setattr(advise_ranks, "of_all", lambda value: [value])
    ((size, taken),) = advise_ranks._timed(0, 0, [0], 0.1)
    assert rate < size / taken < 1.1 * rate


def test_links_of_two_sites(tmp_path: Path) -> None:
    placement = range(4)
    found = run_on_hosts(
        tmp_path, placement, "test_advice", [("links_here", [])], rate="300mbit", between="15mbit"
    )
    network = Network.of(found[0][0])
    assert list(network.site_of) == [0, 0, 1, 1]
    assert len(network.trunks) == 2 and 0 < max(network.trunks.values()) < min(network.host_rates)
    codecs = {each[0]: Codec.of(each, 4) for each in found[0][0]["codecs"]}
    assert found[1][0]["codecs"] == found[0][0]["codecs"]
    assert codecs["BFloat16()"].share == 1 / 2 and codecs["Int8()"].share == (1 + 4 / 256) / 4
    assert all(each.encode_rate > 1e6 and each.decode_rate > 1e6 for each in codecs.values())


# --- the command --------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, torch
assert sys.argv == [__file__], sys.argv
def make():
    model = torch.nn.Linear(1000, 250, bias=False)
    return model, lambda: time.sleep(0.05)
"""


def advise(folder: Path, *words: str) -> tuple[int, str]:
    job = ForkedJob(["-m", "fog_cli", "advise", "-np", "2", *words], folder / "log")
    with started([job]):
        return job.wait(120), job.output


def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT)
    status, output = advise(tmp_path, "--model", str(script))
    assert status == 0, output
    lines = output[output.index("2 ranks on 1 hosts") :].splitlines()
    assert lines[0] == "2 ranks on 1 hosts, 1 MB of parameters"
    compute = re.fullmatch(r"  compute +(.*) ms a step", lines[1])
    assert compute and 50 <= float(compute[1]) < 5000
    assert re.fullmatch(r"  within hosts [\d.]+ GB/s, \d+ us a message", lines[2])
    rows = [re.split(r" {2,}", line[2:]) for line in lines[5 : lines.index("", 5)]]
    assert {row[0] for row in rows} >= {"all-reduce", "ring", "one-peer-exp2"}
    # A megabyte in 50 ms, from memory to memory: one round with all.
    (place,) = (number for number, line in enumerate(lines[5:]) if line.startswith("* "))
    assert rows[place][-2] == "1"
    at = lines.index(f"Recommended: {rows[place][0]}")
    is_ddp = (
        rows[place][0] == "DDP"
    )  # but on a machine that is so busy that an exchange takes a part of a step
    assert ("model = DistributedDataParallel(model)" if is_ddp else "optimizer = fogdist.") in lines[at + 2]
    assert lines[at + 3].startswith("Why: ") and lines[at + 4].startswith("Accuracy: none")
    assert lines[at + 5].startswith("Compression: ranks of one host")


def test_a_script_that_fails_is_named(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("def make():\n    raise ValueError('no data')\n")
    status, output = advise(tmp_path, "--model", str(script))
    assert status == 1 and "ValueError: no data" in output and "doctor" not in output, output
    assert (
        output.splitlines()[-1] == "fog advise: the links were measured, but the script has failed: see above"
    )


def test_a_model_without_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.touch()
    told = json.dumps({"host_of": [0, 0], "compute_s": 1.0, "bytes": 0})
    monkeypatch.setattr(command.run_command, "run", lambda _: os.write(1, f"[0] {told}\n".encode()) * 0)
    assert fog_cli.main(["advise", "-np", "2", "--model", str(script)]) == 2
    assert capfd.readouterr().err == "fog advise: the model has no trained parameters\n"


def test_text_of_two_sites() -> None:
    crossing = {(a, b): 2.0 for a in range(4) for b in range(4) if a // 2 != b // 2}
    links = measured(4, crossing) | {"codecs": [["Int8()", 1.016, 1e9, 1e9], ["Slow()", 1.0, 1.0, 1.0]]}
    text = "\n".join(command.report(links, 1000, 10.0))
    assert "hosts' links 8e-07 Gbit/s, 1000 us a message\n  site 0 to 1  " in text
    assert re.search(r"\n[ *] \S+, Int8\(\) ", text)
    assert text.endswith("\nAverages with Int8(): it pays\nAverages with Slow(): it does not pay")


# --- the sweep ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_sweep_of_two_hosts(tmp_path: Path) -> None:
    with emulated_hosts(2, "1gbit"):
        pass
    numbers, log = tmp_path / "advise.json", tmp_path / "log"
    options = ["--clusters", "two sites", "--hosts", "2", "--local-steps", "1", "2", "--buckets", "16"]
    with log.open("wb") as file:
        status = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "advise.py", *options, "--rounds", "1", "--json", numbers],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
            timeout=100,
            check=False,
        ).returncode
    assert status == 0, log.read_text()
    written = json.loads(numbers.read_text())
    (cluster,) = written["clusters"]
    assert not written["failures"]
    assert sum(point["is_choice"] for point in cluster["points"]) == 1
    assert {(point["topology"], point["local_steps"]) for point in cluster["points"]} >= {
        ("all-reduce", 1),
        ("ring", 2),
    }
    assert min(point["step_s"] for point in cluster["points"]) >= 0.15
    # Between the two hosts is the line of the two sites: 1/25 of what their own links have.
    (link,) = {round(each / cluster["between_bits_per_s"]) for each in cluster["measured"]["host_bits_per_s"]}
    assert link == 1
