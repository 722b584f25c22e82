"""The setting of a running job: what a rank measures while it trains, and how all ranks move to another setting together."""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fog_pg import _extension
from fogdist.compression import Codec, Int8, TopK
from fogdist.context import Context
from fogdist.topology import Topology, named
from fogdist.training.algorithm import Algorithm, check_count
from fogdist.training.mixing import Finish, Mixing, Neighbors, Round
from fogdist.tuning import decision, prediction
from fogdist.tuning.network import Exchanged, Links, Network
from fogdist.tuning.prediction import Way

_log = logging.getLogger("fogdist.tuning")

# In every so many rounds ranks tell each other what they have measured, and decide in the round after that.
REPORT_ROUNDS = 2
# A transfer counts for at least this part of the time of its exchange, the rest of which the sender may have been late.
_LEAST_PART = 0.1
# How many times as long as predicted an exchange is taken for: the first bucket is encoded before and the last one decoded after
# it, and what a link lets through at once makes a measured rate too high. At the edge, steps took 1.15 times as long.
_MARGIN = 1.1
# Bytes per second at which a rank adds what it received, for which the predictions ask.
_SUM_RATE = 4e9
# The rounds of which the one with the least compute a step counts.
_COMPUTES = 3
# Elements of which each codec is timed, once.
_CODEC_ELEMENTS, _CODEC_TRIALS = 1 << 16, 3
# Numbers of a rank in a report: whether they count, compute, distance; of a codec: both rates; of a round: those of
# `Exchanged`, with 1 added to the source.
_OWN, _OF_CODEC, _OF_ROUND = 3, 2, 4


@dataclass(frozen=True)
class Tune:
    """The bounds of what ``tune=`` may choose.

    Args:
        max_local_steps: The most local steps.
        codecs: The codecs that it may use beside none; () for none. None for `Int8`, where the algorithm takes codecs.

    Raises:
        TypeError: A number is no int, a codec no codec.
        ValueError: `max_local_steps` is below 1; a codec is a `TopK`, of which averages of parameters lose too much.
    """

    max_local_steps: int = decision.MOST_AVERAGED
    codecs: Sequence[Codec] | None = None

    def __post_init__(self) -> None:
        check_count(self.max_local_steps, "max_local_steps")
        for each in self.codecs or ():
            if not isinstance(each, Codec):
                raise TypeError(f"codecs must hold codecs of fogdist.compression, got {each!r}")
            if isinstance(each, TopK):
                raise ValueError(
                    f"codecs must not hold {each!r}: averages of parameters lose too much by it; SparseLoCo and ChocoSGD take it"
                )


@dataclass(frozen=True)
class Change:
    """A move to another setting.

    Attributes:
        step: The steps that the rank had made.
        topology: As the argument `topology` of a script.
        local_steps: From then on.
        compression: The codec, or None.
        reason: In one line.
        sites: The site of each rank, as measured.
        compute: Seconds of a step without exchanges, of the slowest rank.
        rates: Bytes per second of each host's link, as measured.
        distance: How far ranks moved in the last average, relative to their parameters; the mean of the ranks.
    """

    step: int
    topology: str
    local_steps: int
    compression: Codec | None
    reason: str
    sites: tuple[int, ...] = ()
    compute: float = 0.0
    rates: tuple[float, ...] = ()
    distance: float = 0.0


@dataclass
class _Sample:
    """One round of a rank: where its values came from, and when the exchanges of its parts began and ended."""

    source: int | None
    sources: int
    bytes: float = 0.0  # of each source, as sent
    plain_bytes: float = 0.0  # of the tensors
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def spans(self) -> list[list[float]]:
        """Returns the times in which an exchange was in flight, without overlaps."""
        found: list[list[float]] = []
        for begin, end in sorted(zip(self.begun, self.ended, strict=True)):
            if found and begin <= found[-1][1]:
                found[-1][1] = max(found[-1][1], end)
            else:
                found.append([begin, end])
        return found


class TunedMixing(Mixing):
    """Averages with the neighbors of a topology, which a `Tuner` changes between rounds, and measures.

    Args:
        start: At first.

    Attributes:
        current: Of the next round.
        blocked: Seconds that this rank has waited for exchanges since the beginning of the round.
        sample: Of the round.
        distance: How far the first tensor moved in the last average, relative to its norm.
    """

    def __init__(self, start: Neighbors) -> None:
        self.start = self.current = start
        self.blocked = self.distance = 0.0
        self.sample: _Sample | None = None

    def __repr__(self) -> str:
        return f"TunedMixing({self.start!r})"

    def items(self, context: Context) -> list[str]:
        """See `Mixing.items`."""
        return ["tuned", *self.start.items(context)]

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        """See `Mixing.begin`."""
        begun = time.perf_counter()
        sample = self._sample_of(round)
        place = len(sample.begun)
        sample.begun.append(begun)
        sample.ended.append(math.inf)
        codec = self.current.compression
        for each in tensors:
            sample.plain_bytes += each.nbytes
            sample.bytes += each.nbytes if codec is None else codec.bytes(each.numel(), each.dtype)

        def has_ended(_: Any) -> None:
            sample.ended[place] = time.perf_counter()

        def watch(work: dist.Work) -> None:
            work.get_future().add_done_callback(has_ended)

        finish = self.current.begin(tensors, replace(round, watch=watch), in_place)
        self.blocked += time.perf_counter() - begun
        own = None if in_place or place or not tensors else tensors[0]

        def finished() -> list[Tensor]:
            waits = time.perf_counter()
            results = finish()
            now = time.perf_counter()
            sample.ended[place] = min(sample.ended[place], now)
            self.blocked += now - waits
            if own is not None and results and not own.is_complex():
                norm = float(own.norm())
                self.distance = float((results[0] - own).norm()) / norm if norm else 0.0
            return results

        return finished

    def _sample_of(self, round: Round) -> _Sample:
        if self.sample is None:
            topology = self.current.topology_in(round.context)
            sources = list(topology.peers(round.context.rank, round.number)["src_weights"])
            self.sample = _Sample(sources[0] if sources else None, len(sources))
        return self.sample


class Tuner:
    """Measures a running job, and moves its topology, local steps and codec. All ranks make one alike.

    A rank measures its compute, the time of a round without what it waits for exchanges, and the transfers of the exchanges:
    their bytes, and their time from begin to end without that for which the sender was late. In every second round the
    ranks begin an allreduce of these numbers, some hundred bytes a rank, which travels beside the round's exchange. At the
    next round's beginning all have the same numbers, make the same decision of them (`fogdist.tuning.decision.moved`), and
    move.

    Args:
        algorithm: It trains with the mixing.
        mixing: Its mixing.
        bounds: What it may choose.
        hides: Steps of compute behind which the algorithm hides an exchange.
        topology: The only one that it may use; None for all of one peer a round.

    Attributes:
        history: All moves, the oldest first, and the start before them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        mixing: TunedMixing,
        bounds: Tune,
        *,
        hides: float,
        topology: Topology | None = None,
    ) -> None:
        self._algorithm: Algorithm = weakref.proxy(algorithm)
        self._mixing = mixing
        self._fixed = topology
        self._method = decision.Method(algorithm.algorithm_name, hides=hides)
        self._local_steps = [each for each in decision.LOCAL_STEPS if each <= bounds.max_local_steps]
        codecs = bounds.codecs if bounds.codecs is not None else [Int8()]
        self._codecs = {repr(each): each for each in codecs if algorithm.takes_compression}
        self.history = [self._change("the start", mixing.start, algorithm.local_steps)]
        self._moves = 0
        # Reports of rounds up to this one are not begun.
        self._last_missed = -1
        self._name = f"{algorithm.name} tuning"
        # The ranks' numbers, and the operation that brings them together.
        self._report: tuple[Tensor, dist.Work] | None = None
        self._codec_rates: list[float] | None = None
        extension = _extension.load()
        extension.observe(True)
        weakref.finalize(self, extension.observe, False).atexit = False
        self._links = Links(algorithm.context.machine_of, REPORT_ROUNDS)
        self._rounds: dict[int, Exchanged] = {}  # by number modulo REPORT_ROUNDS
        self._ways: dict[tuple[int, ...], list[Way]] = {}
        self._computes = deque[float](maxlen=_COMPUTES)
        self._bytes = 0.0
        self._since: tuple[float, int] | None = None
        self._traffic: dict[int, dict[str, Any]] = {}

    @property
    def setting(self) -> Change:
        """The present setting."""
        return self.history[-1]

    # --- called by the algorithm at the beginning of a round ---

    def begin_round(self) -> None:
        """See `fogdist.training.algorithm.Tuning`: ends the report of the round before, and moves if that says so."""
        self._note_round()
        pending, self._report = self._report, None
        if pending is None:
            return
        report, work = pending
        begin = time.perf_counter()
        try:
            work.wait()
        except dist.DistBackendError as failure:
            self._give_up_report(failure)
            return
        self._mixing.blocked += time.perf_counter() - begin
        self._take(report.tolist())

    def joined(self) -> None:
        """See `fogdist.training.algorithm.Tuning`: begins a report in every second round."""
        self._since = time.perf_counter(), self._algorithm.steps
        self._mixing.blocked, self._mixing.sample = 0.0, None
        self._traffic = self._algorithm.context.backend.traffic
        rounds = self._algorithm.rounds
        if rounds > self._last_missed and rounds % REPORT_ROUNDS == REPORT_ROUNDS - 1:
            context, numbers = self._algorithm.context, self._numbers()
            length = len(numbers)
            report = torch.zeros(context.size * length, dtype=torch.float64, device="cpu")
            own = slice(context.rank * length, (context.rank + 1) * length)
            report[own] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            try:
                work = context.backend.allreduce_named(report, dist.ReduceOp.SUM, name=self._name)
            except dist.DistBackendError as failure:
                # For example, another rank has ended all exchanges to let a process in.
                self._give_up_report(failure)
            else:
                self._report = report, work

    def close(self) -> None:
        """See `fogdist.training.algorithm.Tuning`."""
        pending, self._report = self._report, None
        if pending is not None:
            with contextlib.suppress(
                *([] if self._algorithm.on_loss == "raise" else [dist.DistBackendError])
            ):
                pending[1].wait()

    def schedule(self) -> dict[str, int]:
        """See `fogdist.training.algorithm.Tuning`."""
        codec = self.setting.compression
        place = -1 if codec is None else list(self._codecs).index(repr(codec))
        return {"moves": self._moves, "tuned local steps": self.setting.local_steps, "tuned codec": place}

    def members_changed(self, told: Sequence[Mapping[str, int]]) -> None:
        """See `fogdist.training.algorithm.Tuning`: the ranks go on with the local steps and the codec of the last move.

        A rank may have had the report of a move that has failed on another one. What was measured does not count any more.
        """
        self._report = self._since = self._mixing.sample = None
        self._rounds.clear()
        self._ways.clear()
        context = self._algorithm.context
        self._links = Links(context.machine_of, REPORT_ROUNDS)
        # Ranks that are at the last exchange would begin no report before it, those that come to it later would.
        self._last_missed = max(each["rounds"] for each in told)
        last = max(told, key=lambda each: each["moves"])
        codec = [*self._codecs.values(), None][last["tuned codec"]]
        mixing = Neighbors(start_of(self._fixed, context.size).topology, compression=codec)
        self._apply(self._change("the ranks have changed", mixing, last["tuned local steps"]), mixing)
        self._moves = last["moves"] + 1

    def _give_up_report(self, failure: dist.DistBackendError) -> None:
        """Lets the exchange of this round fail too, where the ranks agree on who takes part and on the setting.

        Raises:
            torch.distributed.DistBackendError: `failure`, where losses raise.
        """
        if self._algorithm.on_loss == "raise":
            raise failure
        self._algorithm.context.backend.abort()

    # --- what this rank has measured ---

    def _note_round(self) -> None:
        """Takes the measurements of the round that has ended."""
        algorithm, sample = self._algorithm, self._mixing.sample
        if self._since is None or sample is None:
            return
        begin, steps = self._since
        made = algorithm.steps - steps
        if made > 0:
            self._computes.append(max(1e-6, time.perf_counter() - begin - self._mixing.blocked) / made)
        self._bytes = max(self._bytes, sample.plain_bytes)
        spans = sample.spans()
        taken = sum(end - begin for begin, end in spans)
        place = (algorithm.rounds - 1) % REPORT_ROUNDS
        self._rounds.pop(place, None)
        if sample.source is None or not math.isfinite(taken) or taken <= 0.0:
            return
        late = self._lateness(sample.source) * len(spans)
        seconds = max(taken - late, _LEAST_PART * taken)
        self._rounds[place] = Exchanged(sample.source, sample.sources * sample.bytes, seconds, taken)

    def _lateness(self, source: int) -> float:
        """Returns the seconds for which a rank's messages were waited for in this round, from the begin of the exchange."""
        now, before = self._algorithm.context.backend.traffic.get(source, {}), self._traffic.get(source, {})
        messages, waited = (
            float(now.get(name, 0.0)) - float(before.get(name, 0.0))
            for name in ("received_messages", "waited")
        )
        return waited / messages if messages > 0 else 0.0

    def _numbers(self) -> list[float]:
        """Returns this rank's part of a report."""
        if self._codec_rates is None:
            self._codec_rates = [rate for each in self._codecs.values() for rate in _rates_of(each)]
        rounds = [self._rounds.get(place, Exchanged(-1, 0.0, 0.0, 0.0)) for place in range(REPORT_ROUNDS)]
        compute = min(self._computes, default=0.0)  # as what else a machine does makes single steps longer
        return [
            float(compute > 0.0),
            compute,
            self._mixing.distance,
            *self._codec_rates,
            *(n for each in rounds for n in (each.source + 1, each.size, each.seconds, each.span)),
        ]

    # --- what all ranks have measured ---

    def _take(self, numbers: Sequence[float]) -> None:
        """Decides by the numbers of all ranks, of which all have the same."""
        context = self._algorithm.context
        length = _OWN + _OF_CODEC * len(self._codecs) + _OF_ROUND * REPORT_ROUNDS
        ranks = [numbers[place : place + length] for place in range(0, len(numbers), length)]
        if len(ranks) != context.size or not all(each[0] for each in ranks):
            return
        compute = max(each[1] for each in ranks)
        # Links that need less than half of the compute count alike: faster ones change nothing, and short times are uncertain.
        self._links.learn([_exchanged(ranks, place) for place in range(REPORT_ROUNDS)])
        network = self._links.network(compute / 2, _SUM_RATE)
        if network is None:
            return
        codecs = {}
        for place, (name, codec) in enumerate(self._codecs.items()):
            at = _OWN + _OF_CODEC * place
            rates = (min(each[at + number] for each in ranks) for number in range(_OF_CODEC))
            share = codec.bytes(_CODEC_ELEMENTS) / (4 * _CODEC_ELEMENTS)
            codecs[name] = prediction.Codec(name, share, *rates)
        groups = self._settings(network, compute, codecs)
        if not groups[0]:
            return
        now = self.setting
        codec_now = None if now.compression is None else repr(now.compression)
        chosen = decision.moved(groups, (now.topology, now.local_steps, codec_now), compute)
        if chosen is None or chosen.way.topology is None:
            return
        slowest = min(network.host_rates)
        trunks = [f", {8 * min(network.trunks.values()) / 1e6:.3g} between sites"] if network.trunks else []
        reason = (
            f"links of {8 * slowest / 1e6:.3g} Mbit/s{''.join(trunks)}: an exchange takes {1e3 * chosen.exchange:.3g} ms "
            f"beside {1e3 * compute:.3g} ms of compute, a step {1e3 * chosen.step:.3g} ms"
        )
        codec_name = "" if chosen.codec is None else chosen.codec.code
        mixing = Neighbors(chosen.way.topology, compression=self._codecs.get(codec_name))
        distance = sum(each[2] for each in ranks) / len(ranks)
        change = self._change(reason, mixing, chosen.local_steps, chosen.way.code)
        self._apply(
            replace(
                change,
                sites=tuple(network.sites),
                compute=compute,
                rates=tuple(network.host_rates),
                distance=distance,
            ),
            mixing,
        )

    def _settings(
        self, network: Network, compute: float, codecs: dict[str, prediction.Codec]
    ) -> list[list[decision.Setting]]:
        """Returns the settings to choose from, by codec, without one first."""
        key = tuple(network.site_of)
        if key not in self._ways:
            self._ways = {key: self._ways_in(network)}
        chosen = self._ways[key]
        of_cap = [(self._algorithm._bucket_bytes or (4 << 20)) / 2**20]
        options: dict[str, Any] = {"local_steps": self._local_steps, "buckets_mb": of_cap, "chosen": chosen}
        options.update(method=self._method, margin=_MARGIN)
        return [
            decision.settings(network, compute, self._bytes, codec=each, **options)
            for each in (None, *codecs.values())
        ]

    def _ways_in(self, network: Network) -> list[Way]:
        """Returns the ways of one peer a round, whose exchanges show the rate of each link."""
        if self._fixed is not None:
            present = self._mixing.current.topology_in(self._algorithm.context)
            way = prediction.along(present, _code_of(self._fixed), network.host_of)
            return [] if way is None else [way]
        found = [each for each in prediction.ways(network) if each.topology is not None]
        return [each for each in found if all(traffic.messages <= 1 for traffic in each.traffic)]

    # --- moves ---

    def _change(self, reason: str, mixing: Neighbors, local_steps: int, code: str = "") -> Change:
        assert mixing.topology is not None
        code = code or _code_of(mixing.topology)
        return Change(self._algorithm.steps, code, local_steps, mixing.compression, reason)

    def _apply(self, change: Change, mixing: Neighbors) -> None:
        self._mixing.current = mixing
        self._algorithm.local_steps = change.local_steps
        self.history.append(change)
        self._moves += 1
        codec = "" if change.compression is None else f", {change.compression!r}"
        if self._algorithm.context.rank == 0:
            _log.warning(
                "step %d: %s, %d local steps%s; %s",
                change.step,
                change.topology,
                change.local_steps,
                codec,
                change.reason,
            )


def checked(
    tune: bool | Tune,
    kind: type[Algorithm],
    compression: Codec | None,
    local_steps: int,
    patience: float | None,
) -> Tune:
    """Returns the bounds of an argument `tune`.

    Args:
        tune: The argument: True or bounds.
        kind: The algorithm that it is for.
        compression: As given beside it.
        local_steps: As given beside it.
        patience: As given beside it.

    Raises:
        TypeError: It is neither a bool nor a `Tune`.
        ValueError: It excludes what is given beside it, or the algorithm takes none of its codecs.
    """
    if tune is not True and not isinstance(tune, Tune):
        raise TypeError(f"tune must be a bool or a fogdist.Tune, got {type(tune).__name__}")
    bounds = Tune() if tune is True else tune
    if compression is not None:
        raise ValueError(
            f"compression must be None with tune, whose codecs are Tune(codecs=...), got {compression!r}"
        )
    if patience is not None:
        raise ValueError(f"patience must be None with tune, got {patience}")
    if bounds.codecs and not kind.takes_compression:
        raise ValueError(
            f"tune must have no codecs for {kind.__name__}, which takes none, got {bounds!r}; give an order"
        )
    check_count(local_steps, "local_steps")
    if local_steps > bounds.max_local_steps:
        raise ValueError(
            f"local_steps must be at most max_local_steps={bounds.max_local_steps} of tune, got {local_steps}"
        )
    return bounds


def start_of(topology: Topology | None, size: int) -> Neighbors:
    """Returns the mixing that a job begins with: one peer a round, in pairs if possible, which show the rate of one link."""
    name = "one-peer-exp2" if size & (size - 1) else "base-2"
    return Neighbors(named(name, size) if topology is None else topology)


def _exchanged(ranks: Sequence[Sequence[float]], place: int) -> dict[int, Exchanged]:
    """Returns what the ranks tell in a report of one of its rounds, by rank."""
    begin = -_OF_ROUND * (REPORT_ROUNDS - place)
    of_round = {rank: numbers[begin : begin + _OF_ROUND or None] for rank, numbers in enumerate(ranks)}
    return {
        rank: Exchanged(int(source) - 1, *measured)
        for rank, (source, *measured) in of_round.items()
        if source
    }


def _code_of(topology: Topology) -> str:
    """Returns what `Change.topology` calls a topology of a name."""
    return f'"{topology.name}"'


def _rates_of(codec: Codec) -> tuple[float, float]:
    """Returns the bytes per second that this rank encodes and decodes."""
    x = torch.ones(_CODEC_ELEMENTS, device="cpu")
    encoding = decoding = math.inf
    for _ in range(_CODEC_TRIALS):  # the first one has to load
        begin = time.perf_counter()
        message = codec.encode(x)
        middle = time.perf_counter()
        codec.decode(message, x.shape)
        encoding = min(encoding, middle - begin)
        decoding = min(decoding, time.perf_counter() - middle)
    return x.nbytes / encoding, x.nbytes / decoding
