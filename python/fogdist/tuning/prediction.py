"""How long an exchange takes: what each way to average sends over which link, and codecs. Pure functions, without torch.

    exchange = buckets x messages x latency                               messages: one after the other, of a rank
             + max over all links of (bytes over the link / its rate)     links: see `Network`
             + bucket x (messages + 1) / rate of sums                     the last bucket is summed when all have come

With a codec the links carry less, and the processor encodes and decodes while they do; what the codec does with the first
bucket before, and with the last one after, comes on top, in the place of the sum:

    exchange = buckets x messages x latency
             + max(bytes over the link x the codec's share / its rate, bytes / rates of encoding and decoding)
             + bucket / rates of encoding and decoding
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fogdist.tuning.network import Network

if TYPE_CHECKING:
    from fogdist.topology import Topology

# Disagreement, relative to the start, to which the rounds are counted, and the most that are.
GOAL, MOST_ROUNDS = 0.1, 2000
# The most rounds of a period whose traffic is counted.
MOST_COUNTED = 64
# A topology of sites has a round in which ranks of different sites exchange after so many others.
CROSSINGS = (1, 4, 16)
# Of a round, the most tensors that cross from a site to another one: where there are sites, other ways are left out.
MOST_CROSSING = 2.0
# Fog's sums of large tensors go around a ring up to so many hosts: collectives/cutovers.hpp.
_MOST_IN_RING = 30


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
        topology: The topology itself; None for a mixing that has none.
    """

    name: str
    code: str
    rounds: int
    traffic: Sequence[Traffic]
    encoded: float = 1.0
    topology: Topology | None = field(default=None, compare=False)


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


def ways(network: Network) -> list[Way]:
    """Returns the ways that exist for so many ranks on such hosts, and that spare the lines between sites."""
    from fogdist import topology

    size = len(network.host_of)
    names = ["exp2", "ring", "one-peer-exp2", "base-2", *(["base-3"] if size > 3 else [])]
    tried = {f'"{name}"': topology.named(name, size) for name in names}
    for of_sites in (False, True):
        group = network.equal_groups(of_sites)
        if group is not None and 3 <= group < size:
            code = f"topology.inner_outer_exponential({size}, {group})"
            tried[code] = topology.inner_outer_exponential(size, group)
    sites = network.sites
    if len(set(sites)) > 1:
        for every in CROSSINGS:
            tried[f"topology.by_sites({sites}, every={every})"] = topology.by_sites(sites, every=every)
    found = [along(each, code, network.host_of) for code, each in tried.items()]
    group = network.equal_groups()
    if group is not None and 2 <= group < size:
        found.append(_by_machines(network, group))
    return [_all_reduce(network), *(way for way in found if way is not None and _spares(way, network))]


def _spares(way: Way, network: Network) -> bool:
    """Returns whether no round sends the tensors of all ranks of a site over its line to another one, nor more than two."""
    sites = network.sites
    most = max(1, min(MOST_CROSSING, min(sites.count(site) for site in sites) - 1))
    for each in way.traffic:
        over: dict[tuple[int, int], float] = defaultdict(float)
        for (here, there), tensors in each.between.items():
            over[network.site_of[here], network.site_of[there]] += tensors
        if any(tensors > most for (a, b), tensors in over.items() if a != b):
            return False
    return True


def along(topology: Topology, code: str, host_of: Sequence[int]) -> Way | None:
    """Returns the way along a topology; None if ranks do not come to agree by it. Of a long period it has the first rounds."""
    rounds = topology.rounds_to(GOAL, MOST_ROUNDS)
    if rounds is None:
        return None
    traffic = []
    for t in range(min(topology.period, MOST_COUNTED)):
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
    return Way(topology.name, code, rounds, traffic, topology=topology)


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


def complete(network: Network) -> Way:
    """Returns the exact average by a message to each other rank."""
    from fogdist import topology

    way = along(topology.named("full", len(network.host_of)), "", network.host_of)
    assert way is not None
    return way


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
