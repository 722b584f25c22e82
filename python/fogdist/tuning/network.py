"""The links between ranks, and the hosts and sites that measured transfers show. Pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Hosts are of one site if transfers between them get more than this part of the best rate.
SAME_SITE = 0.5


@dataclass(frozen=True)
class Transfer:
    """One measured transfer between two hosts.

    Attributes:
        together: A number that the transfers of one time have in common: they share links.
        source: The host that sent.
        target: The host that received.
        size: Bytes.
        seconds: What it took, until the receiver had it.
    """

    together: int
    source: int
    target: int
    size: float
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds


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
        transfers = [
            Transfer(distance, source, (source + distance) % hosts, size, seconds)
            for distance, source, size, seconds in measured["transfers"]
        ]
        return cls.between(
            host_of,
            transfers,
            latency=measured["latency_s"],
            latency_within=measured["latency_within_s"],
            local_rates=[rate or math.inf for rate in measured["local_rates"]],
            sum_rate=measured["sum_rate"],
        )

    @classmethod
    def between(
        cls,
        host_of: Sequence[int],
        transfers: Sequence[Transfer],
        *,
        latency: float,
        latency_within: float,
        local_rates: Sequence[float],
        sum_rate: float,
    ) -> Network:
        """Returns the network of transfers between hosts, with the sites that they show.

        Args:
            host_of: As in the class.
            transfers: Not of all pairs of hosts, but of each host.
            latency: As in the class.
            latency_within: As in the class.
            local_rates: As in the class.
            sum_rate: As in the class.
        """
        hosts = max(host_of) + 1
        sites = sites_of(hosts, transfers)
        inside: dict[int, float] = dict.fromkeys(range(hosts), 0.0)
        anywhere = dict(inside)
        crossing: dict[tuple[int, int, int], list[Transfer]] = defaultdict(list)
        for each in transfers:
            pair = sites[each.source], sites[each.target]
            for host in (each.source, each.target):
                anywhere[host] = max(anywhere[host], each.rate)
                if pair[0] == pair[1]:
                    inside[host] = max(inside[host], each.rate)
            if pair[0] != pair[1]:
                crossing[pair[0], pair[1], each.together].append(each)
        trunks: dict[tuple[int, int], float] = {}
        for (a, b, _), together in crossing.items():
            rate = sum(each.size for each in together) / max(each.seconds for each in together)
            trunks[a, b] = max(trunks.get((a, b), 0.0), rate)
        # A line of which no transfer is known is like its other direction, or else like the slowest one.
        for a, b in itertools.permutations(set(sites), 2):
            if (a, b) not in trunks:
                trunks[a, b] = trunks.get((b, a)) or min(trunks.values(), default=math.inf)
        return cls(
            host_of,
            sites,
            latency,
            latency_within,
            # A host that is a site by itself has a link of its own kind.
            [inside[host] or anywhere[host] or math.inf for host in range(hosts)],
            local_rates,
            trunks,
            sum_rate,
        )

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(self.site_of)

    @property
    def sites(self) -> list[int]:
        """The site of each rank."""
        return [self.site_of[host] for host in self.host_of]

    def equal_groups(self, of_sites: bool = False) -> int | None:
        """Returns how many consecutive ranks each host (or site) has; None if they are not equally many."""
        places = self.sites if of_sites else list(self.host_of)
        counts = [len(list(group)) for _, group in itertools.groupby(places)]
        same = len(counts) == len(set(places)) and len(set(counts)) == 1
        return counts[0] if same else None


def sites_of(hosts: int, transfers: Sequence[Transfer]) -> list[int]:
    """Returns the site of each host: those whose mean rate is the best are joined, down to `SAME_SITE` of the best rate."""
    rates: dict[tuple[int, int], list[float]] = defaultdict(list)
    for each in transfers:
        rates[min(each.source, each.target), max(each.source, each.target)].append(each.rate)
    if not rates:
        return [0] * hosts
    means = {pair: statistics.fmean(found) for pair, found in rates.items()}
    least = SAME_SITE * max(means.values())
    sites = [[host] for host in range(hosts)]

    def between(a: Sequence[int], b: Sequence[int]) -> float:
        pairs = [(min(i, j), max(i, j)) for i in a for j in b]
        return statistics.fmean([means[pair] for pair in pairs if pair in means] or [0.0])

    while len(sites) > 1:
        rate, a, b = max(
            (between(a, b), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(sites), 2)
        )
        if rate <= least:
            break
        sites[a] += sites.pop(b)
    number = {host: place for place, site in enumerate(sorted(sites, key=min)) for host in site}
    return [number[host] for host in range(hosts)]
