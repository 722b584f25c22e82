"""What `fog advise` recommends, from measured links and compute: pure functions, without torch.

A step of decentralized SGD in the order "awc" begins its exchange with the forward pass and ends it in `step`, so only
what an exchange takes longer than the compute is added:

    step     = compute + max(0, exchange - compute) / local steps        (the mean over the rounds of a topology)
    exchange = buckets x messages x latency                               messages: one after the other, of a rank
             + max over all links of (bytes over the link / its rate)     links: see `Network`
             + bucket x (messages + 1) / rate of sums                     the last bucket is summed when all have come

With a codec the links carry less, and the processor encodes and decodes while they do; what the codec does with the first
bucket before, and with the last one after, comes on top, in the place of the sum:

    exchange = buckets x messages x latency
             + max(bytes over the link x the codec's share / its rate, bytes / rates of encoding and decoding)
             + bucket / rates of encoding and decoding

The rule: of the settings whose step takes at most `tolerance` longer than compute alone, or if there are none, than the
fastest setting, the one that needs the least time to a tenth of the ranks' disagreement, which is
rounds x local steps x step. Of settings that are equally good within 2 %, the one that sends the least.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fogdist.topology import Topology

# Hosts are of one site if transfers between them get more than this part of the best rate.
SAME_SITE = 0.5
# Disagreement, relative to the start, to which the rounds are counted, and the most that are.
GOAL, MOST_ROUNDS = 0.1, 2000
EQUALLY_GOOD = 1.02
# A codec pays if the time to GOAL is at most this part of that without.
PAYS = 0.95
LOCAL_STEPS = tuple(1 << power for power in range(11))
BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Fog's sums of large tensors go around a ring up to so many hosts: collectives/cutovers.hpp.
_MOST_IN_RING = 30


@dataclass(frozen=True)
class Transfer:
    """One measured transfer: of all at one time from each host to the one `distance` hosts further.

    Attributes:
        distance: Number of hosts between the two, modulo the number of hosts.
        source: The host that sent.
        size: Bytes.
        seconds: What it took, until the receiver had it.
    """

    distance: int
    source: int
    size: float
    seconds: float


@dataclass(frozen=True)
class Network:
    """The links between ranks, as far as the predictions need them. Rates are in bytes per second, each way.

    Attributes:
        host_of: The host of each rank, numbered from 0.
        site_of: The site of each host. Hosts of one site reach each other at about the same rate.
        latency: Seconds of an exchange of a small message between hosts.
        latency_within: The same between ranks of a host.
        host_rates: Of each host's link, which its ranks share.
        local_rates: Of each host: what all its ranks together exchange among themselves.
        trunks: What all hosts of a site together send to those of another one, by both sites.
        sum_rate: At which a rank adds what it received to its own.
    """

    host_of: Sequence[int]
    site_of: Sequence[int]
    latency: float
    latency_within: float
    host_rates: Sequence[float]
    local_rates: Sequence[float]
    trunks: Mapping[tuple[int, int], float]
    sum_rate: float

    @classmethod
    def of(cls, measured: Mapping[str, Any]) -> Network:
        """Returns the network of what the ranks have measured; see `fog_cli.programs.advise_ranks.measure`."""
        host_of = list(measured["host_of"])
        hosts = max(host_of) + 1
        transfers = [Transfer(*each) for each in measured["transfers"]]
        sites = sites_of(hosts, transfers)
        inside: dict[int, float] = dict.fromkeys(range(hosts), 0.0)
        anywhere = dict(inside)
        crossing: dict[tuple[int, int, int], list[Transfer]] = {}
        for each in transfers:
            target = (each.source + each.distance) % hosts
            pair = sites[each.source], sites[target]
            for host in (each.source, target):
                rate = each.size / each.seconds
                anywhere[host] = max(anywhere[host], rate)
                if pair[0] == pair[1]:
                    inside[host] = max(inside[host], rate)
            if pair[0] != pair[1]:
                crossing.setdefault((*pair, each.distance), []).append(each)
        trunks: dict[tuple[int, int], float] = {}
        for (a, b, _), together in crossing.items():
            rate = sum(each.size for each in together) / max(each.seconds for each in together)
            trunks[a, b] = max(trunks.get((a, b), 0.0), rate)
        return cls(
            host_of,
            sites,
            measured["latency_s"],
            measured["latency_within_s"],
            # A host that is a site by itself has a link of its own kind.
            [inside[host] or anywhere[host] or math.inf for host in range(hosts)],
            [rate or math.inf for rate in measured["local_rates"]],
            trunks,
            measured["sum_rate"],
        )

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(self.site_of)

    def equal_groups(self, of_sites: bool = False) -> int | None:
        """Returns how many consecutive ranks each host (or site) has; None if they are not equally many."""
        places = [self.site_of[host] if of_sites else host for host in self.host_of]
        counts = [len(list(group)) for _, group in itertools.groupby(places)]
        same = len(counts) == len(set(places)) and len(set(counts)) == 1
        return counts[0] if same else None


def sites_of(hosts: int, transfers: Sequence[Transfer]) -> list[int]:
    """Returns the site of each host: those whose mean rate is the best are joined, down to `SAME_SITE` of the best rate."""
    rates: dict[tuple[int, int], list[float]] = {}
    for each in transfers:
        pair = each.source, (each.source + each.distance) % hosts
        rates.setdefault((min(pair), max(pair)), []).append(each.size / each.seconds)
    if not rates:
        return [0] * hosts
    means = {pair: statistics.fmean(found) for pair, found in rates.items()}
    least = SAME_SITE * max(means.values())
    sites = [[host] for host in range(hosts)]

    def between(a: Sequence[int], b: Sequence[int]) -> float:
        return statistics.fmean(means.get((min(i, j), max(i, j)), 0.0) for i in a for j in b)

    while len(sites) > 1:
        rate, a, b = max(
            (between(a, b), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(sites), 2)
        )
        if rate <= least:
            break
        sites[a] += sites.pop(b)
    number = {host: place for place, site in enumerate(sorted(sites, key=min)) for host in site}
    return [number[host] for host in range(hosts)]


@dataclass(frozen=True)
class Traffic:
    """What one round sends, in tensors.

    Attributes:
        between: By sending and receiving host.
        within: By host: of its ranks among themselves.
        messages: That a rank makes one after the other, for each bucket.
    """

    between: Mapping[tuple[int, int], float]
    within: Mapping[int, float]
    messages: int


@dataclass(frozen=True)
class Way:
    """A way to average.

    Attributes:
        name: As in `fog topology`, or of docs/algorithms.md.
        code: The argument `topology` of `fogdist.DecentralizedOptimizer`.
        rounds: To a tenth of the disagreement.
        traffic: Of each round of a period.
        encoded: With a codec, the share of the tensor that a rank encodes, and decodes for each message; 0 if the way
            takes none.
    """

    name: str
    code: str
    rounds: int
    traffic: Sequence[Traffic]
    encoded: float = 1.0


@dataclass(frozen=True)
class Codec:
    """A codec of `fogdist.compression`, as far as the predictions need it.

    Attributes:
        code: That makes it: "Int8()".
        share: Bytes of an encoded tensor, for large tensors, by those of the tensor.
        encode_rate: Bytes of tensors per second that a rank encodes.
        decode_rate: The same of decoding.
    """

    code: str
    share: float
    encode_rate: float
    decode_rate: float

    @classmethod
    def of(cls, measured: Sequence[Any], element_bytes: float) -> Codec:
        """Returns a codec that the ranks have measured, see `fog_cli.programs.advise_ranks`, for elements of some bytes."""
        code, encoded_bytes, *rates = measured
        return cls(code, encoded_bytes / element_bytes, *(element_bytes * rate for rate in rates))

    def seconds(self, size: float, messages: int) -> float:
        """Returns what a rank needs to encode a tensor of `size` bytes, and to decode one for each message."""
        return size / self.encode_rate + messages * size / self.decode_rate


@dataclass(frozen=True)
class Setting:
    """A way with local steps and a bucket size, and what is predicted of it.

    Attributes:
        way: The topology.
        local_steps: Steps from one exchange to the next.
        bucket_mb: MiB of a bucket.
        exchange: Seconds of an exchange, the mean over the rounds.
        step: Seconds.
        agreement: Seconds to a tenth of the disagreement.
        sent: Bytes a step that leave all hosts, plus those within hosts.
        codec: None for exchanges without one.
    """

    way: Way
    local_steps: int
    bucket_mb: float
    exchange: float
    step: float
    agreement: float
    sent: float
    codec: Codec | None = None


def ways(network: Network) -> list[Way]:
    """Returns the ways that exist for so many ranks on such hosts."""
    from fogdist import topology

    size = len(network.host_of)
    names = ["exp2", "ring", "one-peer-exp2"]
    # For powers of two, base-2 is the one-peer exponential graph's equal.
    names += [*(["base-2"] if size & (size - 1) else []), *(["base-3"] if size > 3 else [])]
    tried = {f'"{name}"': topology.named(name, size) for name in names}
    for of_sites in (False, True):
        group = network.equal_groups(of_sites)
        if group is not None and 3 <= group < size:
            code = f"topology.inner_outer_exponential({size}, {group})"
            tried[code] = topology.inner_outer_exponential(size, group)
    found = [along(each, code, network.host_of) for code, each in tried.items()]
    group = network.equal_groups()
    if group is not None and 2 <= group < size:
        found.append(_by_machines(network, group))
    return [_all_reduce(network), *(way for way in found if way is not None)]


def along(topology: Topology, code: str, host_of: Sequence[int]) -> Way | None:
    """Returns the way along a topology; None if ranks do not come to agree by it."""
    rounds = topology.rounds_to(GOAL, MOST_ROUNDS)
    if rounds is None:
        return None
    traffic = []
    for t in range(topology.period):
        between: dict[tuple[int, int], float] = defaultdict(float)
        within: dict[int, float] = defaultdict(float)
        most = 0
        for i, row in enumerate(topology.matrix(t).tolist()):
            peers = [j for j, weight in enumerate(row) if weight and j != i]
            most = max(most, len(peers))
            for j in peers:
                here, there = host_of[i], host_of[j]
                if here == there:
                    within[here] += 1
                else:
                    between[here, there] += 1
        traffic.append(Traffic(between, within, most))
    return Way(topology.name, code, rounds, traffic)


def near_first(hosts: int) -> list[int]:
    """Returns the hosts in the order in which fog's sums take them without a ring: collectives/two_level.hpp."""
    bits = (hosts - 1).bit_length()
    return sorted(range(hosts), key=lambda host: int(f"{host:0{bits}b}"[::-1], 2))


def _all_reduce(network: Network) -> Way:
    """Of large buckets: around a ring, or between many hosts half way around first."""
    hosts = network.hosts
    counts = [list(network.host_of).count(host) for host in range(hosts)]
    within = {host: 2.0 * (count - 1) for host, count in enumerate(counts) if count > 1}
    pairs: dict[tuple[int, int], float] = defaultdict(float)
    levels = 0
    if hosts <= _MOST_IN_RING:
        levels = 2 * (hosts - 1)
        pairs = {(host, (host + 1) % hosts): levels / hosts for host in range(hosts) if hosts > 1}
    else:
        order, left = near_first(hosts), hosts
        while left > 1:
            hop = (left + 1) // 2
            for place, here in enumerate(order):
                there = order[(place + hop) % hosts]
                # The sums one way, and the results the other.
                for pair in ((here, there), (there, here)):
                    pairs[pair] += (left - hop) / hosts
            left = hop
            levels += 2
    traffic = [Traffic(pairs, within, levels + 2 * bool(within))]
    return Way("all-reduce", "GlobalAverage()", 1, traffic, encoded=0.0)


def _by_machines(network: Network, group: int) -> Way | None:
    """The average within each host, and between hosts along their static exponential graph."""
    import numpy as np
    from fogdist import topology

    graph = topology.named("exp2", network.hosts)
    outer = along(graph, "", range(network.hosts))
    averaged = np.full((group, group), 1 / group)
    both = along(topology.Topology("hierarchical", [np.kron(graph.matrix(), averaged)]), "", network.host_of)
    if outer is None or both is None:
        return None
    within = dict.fromkeys(range(network.hosts), 2.0 * (group - 1))
    traffic = [Traffic(each.between, within, each.messages + 2) for each in outer.traffic]
    code = f'Machines() after fogdist.set_machine_topology(topology.by_name("exp2", {network.hosts}))'
    return Way("hierarchical", code, both.rounds, traffic, encoded=1 / group)


def exchange_seconds(
    traffic: Traffic,
    network: Network,
    size: float,
    bucket: float,
    codec: Codec | None = None,
    encoded: float = 1.0,
) -> float:
    """Returns the seconds of an exchange of `size` bytes in buckets of `bucket` bytes; `encoded` is as in `Way`."""
    share = 1.0 if codec is None else codec.share
    out: dict[int, float] = defaultdict(float)
    into: dict[int, float] = defaultdict(float)
    over: dict[tuple[int, int], float] = defaultdict(float)
    for (here, there), tensors in traffic.between.items():
        out[here] += tensors
        into[there] += tensors
        sites = network.site_of[here], network.site_of[there]
        if sites[0] != sites[1]:
            over[sites] += tensors
    loads = [
        share * tensors * size / network.host_rates[host]
        for ends in (out, into)
        for host, tensors in ends.items()
    ]
    loads += [share * tensors * size / network.trunks[sites] for sites, tensors in over.items()]
    loads += [tensors * size / network.local_rates[host] for host, tensors in traffic.within.items()]
    transfer = max(loads, default=0.0)
    bucket = min(bucket, size)
    latency = network.latency if traffic.between else network.latency_within
    messages = math.ceil(size / bucket) * traffic.messages * latency
    if codec is None:
        last = bucket * (traffic.messages + 1) / network.sum_rate
    else:
        transfer = max(transfer, codec.seconds(encoded * size, traffic.messages))
        last = codec.seconds(encoded * bucket, traffic.messages)
    return messages + transfer + last


def settings(
    network: Network,
    compute: float,
    size: float,
    *,
    local_steps: Sequence[int] = LOCAL_STEPS,
    buckets_mb: Sequence[float] = BUCKETS_MB,
    chosen: Sequence[Way] | None = None,
    codec: Codec | None = None,
) -> list[Setting]:
    """Returns every setting with its prediction.

    Args:
        network: The links.
        compute: Seconds of a step alone.
        size: Bytes of the parameters.
        local_steps: To try.
        buckets_mb: MiB of a bucket, to try.
        chosen: The ways to try; by default all that there are. With a codec, those of them that take one.
        codec: Of the exchanges.
    """
    found = []
    share = 1.0 if codec is None else codec.share
    for way in ways(network) if chosen is None else chosen:
        if codec is not None and not way.encoded:
            continue
        for megabytes in buckets_mb:
            rounds = [
                exchange_seconds(each, network, size, megabytes * 2**20, codec, way.encoded)
                for each in way.traffic
            ]
            exchange = statistics.fmean(rounds)
            late = statistics.fmean(max(0.0, seconds - compute) for seconds in rounds)
            tensors = statistics.fmean(
                share * sum(each.between.values()) + sum(each.within.values()) for each in way.traffic
            )
            for steps in local_steps:
                step = compute + late / steps
                agreement, sent = way.rounds * steps * step, tensors * size / steps
                found.append(Setting(way, steps, megabytes, exchange, step, agreement, sent, codec))
    return found


def longest_step(fastest: float, compute: float, tolerance: float) -> float:
    """Returns the seconds that a step may take by the module's rule, as in `best`."""
    return (1 + tolerance) * (compute if fastest <= (1 + tolerance) * compute else fastest)


def best(found: Sequence[Setting], compute: float, tolerance: float) -> Setting:
    """Returns the setting that the module's rule chooses.

    Args:
        found: Not empty.
        compute: Seconds of a step alone.
        tolerance: How much longer a step may take, 0.05 for 5 %.
    """
    allowed = longest_step(min(each.step for each in found), compute, tolerance)
    fast = [each for each in found if each.step <= allowed]
    soonest = min(each.agreement for each in fast)
    good = [each for each in fast if each.agreement <= EQUALLY_GOOD * soonest]
    return min(good, key=lambda each: (each.sent, each.exchange, each.bucket_mb))


def pays(choice: Setting, plain: Setting) -> bool:
    """Returns whether ranks agree sooner with a codec than without: in at most `PAYS` of the time."""
    return choice.agreement <= PAYS * plain.agreement
