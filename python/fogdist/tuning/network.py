"""The links between ranks, and the hosts and sites that measured transfers show. Pure functions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Hosts are of one site if transfers between them get more than this part of the rate that half of the hosts reach.
SAME_SITE = 0.5
# Of the time of a rank's exchange: what its receiver waited at least for it to begin, if it was there in time; and in what
# part the receiver had the message at most, if that ended before the exchange.
_IN_TIME, _ENDED_BEFORE = 0.1, 0.9
# So many periods of the one-peer exponential graph a picture of sites may be unclear, after which it counts as it is.
_UNCLEAR_PERIODS = 4
# Two sites become one only if the line between them carries so many times what it did when they were found: few ranks share
# it since then, so their transfers do not show that it carries those of all.
_GROWN = 4.0


@dataclass(frozen=True)
class Transfer:
    """One measured transfer between two hosts.

    Attributes:
        together: A number that the transfers of one time have in common: they share links.
        source: The host that sent.
        target: The host that received.
        size: Bytes.
        seconds: What it took, until the receiver had it.
        sure: False if it may have taken less.
    """

    together: int
    source: int
    target: int
    size: float
    seconds: float
    sure: bool = True

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
        sites: Sequence[int] | None = None,
    ) -> Network:
        """Returns the network of transfers between hosts.

        Args:
            host_of: As in the class.
            transfers: Not of all pairs of hosts, but of each host.
            latency: As in the class.
            latency_within: As in the class.
            local_rates: As in the class.
            sum_rate: As in the class.
            sites: Of each host; None for those that the transfers show.
        """
        hosts = max(host_of) + 1
        sites = sites or sites_of(hosts, transfers) or [0] * hosts
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


def sites_of(hosts: int, transfers: Sequence[Transfer], least: float = 0.0) -> list[int] | None:
    """Returns the site of each host: those whose mean rate is the best are joined, down to `SAME_SITE` of the others' rate.

    A slow transfer counts only if it is sure, a fast one always. Of the transfers from one host to another the best one counts.

    Args:
        hosts: Their number.
        transfers: Between them.
        least: Rates at which the smallest of them takes less than so many seconds count alike.

    Returns:
        The sites; None if they are not clear, because of the transfers between two of them none counts.
    """
    if not transfers:
        return [0] * hosts
    most = min(each.size for each in transfers) / least if least else math.inf
    rates = [(each, min(each.rate, most)) for each in transfers]
    reached = [
        max((rate for each, rate in rates if host in (each.source, each.target)), default=0.0)
        for host in range(hosts)
    ]
    needed = SAME_SITE * sorted(reached)[hosts // 2]
    best: dict[tuple[int, int], float] = {}
    for each, rate in rates:
        if each.sure or rate > needed:
            best[each.source, each.target] = max(rate, best.get((each.source, each.target), 0.0))
    seen = {(each.source, each.target) for each in transfers}
    sites = [[host] for host in range(hosts)]

    def between(
        a: Sequence[int], b: Sequence[int], pairs: Collection[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        both = itertools.chain(itertools.product(a, b), itertools.product(b, a))
        return [pair for pair in both if pair in pairs]

    def mean(a: Sequence[int], b: Sequence[int]) -> float:
        return statistics.fmean([best[pair] for pair in between(a, b, best)] or [0.0])

    while len(sites) > 1:
        rate, a, b = max((mean(a, b), i, j) for (i, a), (j, b) in itertools.combinations(enumerate(sites), 2))
        if rate <= needed:
            break
        sites[a] += sites.pop(b)
    if any(between(a, b, seen) and not between(a, b, best) for a, b in itertools.combinations(sites, 2)):
        return None
    number = {host: place for place, site in enumerate(sorted(sites, key=min)) for host in site}
    return [number[host] for host in range(hosts)]


@dataclass(frozen=True)
class Exchanged:
    """What a rank has measured of one of its exchanges with one peer.

    Attributes:
        source: The rank from which it received.
        size: Bytes of it.
        seconds: From when this rank and the source had begun to the end.
        span: From when this rank had begun to the end. It ends when the rank has received, and sent what it sends.
    """

    source: int
    size: float
    seconds: float
    span: float


def transfers_of(together: int, exchanged: Mapping[int, Exchanged], host_of: Sequence[int]) -> list[Transfer]:
    """Returns the transfers between hosts of one round, in which each rank may receive from one and send to one.

    An exchange ends when the slower one of its two transfers does. So a transfer took no longer than the exchange of its
    receiver nor than that of its sender. Its time is sure where what the receiver sent had arrived before, or went the same
    way back. It had if the next rank was there in time, and had it earlier.

    Args:
        together: As in `Transfer`.
        exchanged: By receiving rank.
        host_of: The host of each rank.
    """
    found: dict[tuple[int, int], Transfer] = {}
    target_of = {each.source: rank for rank, each in exchanged.items()}
    for rank, each in exchanged.items():
        here, there = host_of[each.source], host_of[rank]
        if here == there:
            continue
        target = target_of.get(rank)
        sure = target in (None, each.source)
        if target is not None and not sure:
            sent = exchanged[target]
            in_time = sent.span - sent.seconds > _IN_TIME * each.span
            sure = in_time and sent.seconds < _ENDED_BEFORE * each.span
        seconds = each.seconds
        if not sure and each.source in exchanged:
            seconds = min(seconds, exchanged[each.source].span)
        # Ranks of one host share its link.
        before = found.get((here, there), Transfer(together, here, there, 0.0, 0.0))
        size, longest = before.size + each.size, max(before.seconds, seconds)
        found[here, there] = Transfer(together, here, there, size, longest, before.sure and sure)
    return list(found.values())


class Links:
    """What the exchanges of a running job have shown of its links. All ranks that are told the same find the same.

    Args:
        host_of: The host of each rank.
        rounds: That each report has.

    Attributes:
        sites: Of each host, as far as they are known.
    """

    def __init__(self, host_of: Sequence[int], rounds: int) -> None:
        self._host_of = host_of
        self.sites = [0] * (max(host_of) + 1)
        self._rounds = rounds
        # The reports in which a period of the one-peer exponential graph fits.
        self._period = math.ceil(math.log2(max(2, len(host_of))) / rounds)
        self._seen: list[tuple[int, Transfer]] = []
        self._reports = self._unclear = 0
        self._candidate: list[int] | None = None
        # The rate of the slowest line between sites when they were found; None before.
        self._found_at: float | None = None

    def learn(self, report: Sequence[Mapping[int, Exchanged]]) -> None:
        """Takes the exchanges of each round of a report, and forgets earlier ones that they replace."""
        self._reports += 1
        for place, exchanged in enumerate(report):
            together = self._rounds * self._reports + place
            self._seen += [(self._reports, each) for each in transfers_of(together, exchanged, self._host_of)]
        newest: dict[tuple[int, int], int] = {}
        sure: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        for number, each in self._seen:
            newest[self._line(each)] = number
            if each.sure:
                sure[each.source, each.target].append(number)

        def counts(number: int, each: Transfer) -> bool:
            # Between sites only the last report counts, as its rounds shared the line; within one the last two that are sure.
            here, there = line = self._line(each)
            kept = _UNCLEAR_PERIODS * self._period if here == there else 1
            return number > newest[line] - kept and number >= sure[each.source, each.target][-2]

        self._seen = [(number, each) for number, each in self._seen if counts(number, each)]

    def network(self, least: float, sum_rate: float) -> Network | None:
        """Returns the network; None as long as too little is known.

        A picture of more sites than before must come twice, and sites stay where the line between them has not grown.
        While a picture is not clear, the last one counts.

        Args:
            least: As in `sites_of`.
            sum_rate: As in `Network`.
        """
        hosts = len(self.sites)
        transfers = [each for _, each in self._seen]
        if self._reports < self._period or len({each.target for each in transfers}) < hosts:
            return None
        sites = sites_of(hosts, transfers, least)
        self._unclear = 0 if sites else self._unclear + 1
        if sites is None and self._unclear >= _UNCLEAR_PERIODS * self._period:
            sites = sites_of(hosts, [replace(each, sure=True) for each in transfers], least)
        before, self._candidate = self._candidate, sites
        more = 0 if sites is None else max(sites) - max(self.sites)
        if sites is None or (more > 0 and sites != before):
            if self._found_at is None:
                return None
            sites = self.sites
        if more < 0 and self._slowest_line(self.sites) < _GROWN * (self._found_at or 0.0):
            sites = self.sites
        if sites != self.sites or self._found_at is None:
            self.sites, self._found_at = sites, self._slowest_line(sites)
        return self._between(sites, sum_rate)

    def _line(self, transfer: Transfer) -> tuple[int, int]:
        return self.sites[transfer.source], self.sites[transfer.target]

    def _slowest_line(self, sites: Sequence[int]) -> float:
        return min(self._between(sites, math.inf).trunks.values(), default=0.0)

    def _between(self, sites: Sequence[int], sum_rate: float) -> Network:
        """Returns the network with some sites. The rates within them are those of the last period, if there are sure ones."""
        last = self._reports - self._period
        crossing = [each for _, each in self._seen if sites[each.source] != sites[each.target]]
        within = [(number, each) for number, each in self._seen if sites[each.source] == sites[each.target]]
        sure = [each for number, each in within if each.sure and number > last]
        known = {host for each in sure for host in (each.source, each.target)}
        others = [each for _, each in within if not known.issuperset((each.source, each.target))]
        return Network.between(
            self._host_of,
            [*crossing, *sure, *others],
            latency=0.0,
            latency_within=0.0,
            local_rates=[math.inf] * len(sites),
            sum_rate=sum_rate,
            sites=sites,
        )
