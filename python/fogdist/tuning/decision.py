"""The choice of a setting from measured links and compute, by `fog advise` and by ``tune=``. Pure functions, without torch.

A step of decentralized SGD in the order "awc" begins its exchange with the forward pass and ends it in `step`, so only
what an exchange takes longer than the compute is added:

    step     = compute + max(0, exchange - compute) / local steps        (the mean over the rounds of a topology)

`fogdist.tuning.prediction` has the exchange. A `Method` says for how many steps of compute an exchange is hidden: with DDP
for that of the backward pass, and its last bucket is not; with DiLoCo and SparseLoCo not at all, or for `delay` steps. Of f
fragments, each is exchanged once in the local steps.

The rule: of the settings whose step takes at most `tolerance` longer than compute alone, or if there are none, than the
fastest setting, the one that needs the least time to a tenth of the ranks' disagreement, which is
rounds x local steps x step. Of settings that are equally good within 2 %, the one that sends the least. `decide` makes this
choice for each method and codec, and of these takes the one with the least predicted time to a loss, which is
step x `steps_to_loss`. DDP stays if its step takes at most `KEEP_DDP` times that of the choice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fogdist.tuning import prediction
from fogdist.tuning.network import Network
from fogdist.tuning.prediction import Codec, Way, exchange_seconds

EQUALLY_GOOD = 1.02
# A codec, or another method, pays if the time that it is chosen by is at most this part of that without.
PAYS = 0.95
TOLERANCE = 0.05
# A running job keeps its setting while that needs at most so many times the time of the best one to a tenth.
KEEPS = 1.25
LOCAL_STEPS = tuple(1 << power for power in range(11))
BUCKETS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# With more local steps than that DiLoCo is chosen, which is made for them.
MOST_AVERAGED = 16
# By the local steps of SparseLoCo, the share that it sends: the first two were measured, the last is published.
SPARSE = {2: 0.045, 4: 0.1, 100: 0.02}
# Averages with neighbors needed 170 steps in place of DDP's 150 to the same loss: docs/measurements/scaling.md has these.
KEEP_DDP = 170 / 150
DDP_BUCKET_MB = 25.0
# By the steps in which the ranks' disagreement falls to a tenth, how many times DDP's steps were needed to the same loss: all
# ranks, one peer of 16, and local SGD with 8 local steps.
STEPS_TO_LOSS = {1: 1.0, 4: 170 / 150, 8: 260 / 150}


@dataclass(frozen=True)
class Method:
    """An algorithm, as far as the predictions need it.

    Attributes:
        name: What a script calls.
        options: The arguments that make it, beside those of a `Setting`.
        hides: Steps of compute behind which an exchange is hidden.
        last_seen: Whether the last bucket of an exchange is not hidden.
    """

    name: str
    options: str = ""
    hides: float = 0.0
    last_seen: bool = False


DDP = Method("DistributedDataParallel", hides=2 / 3, last_seen=True)
AVERAGES = Method("DecentralizedOptimizer", 'order="awc"', hides=1.0)
DILOCO = Method("DiLoCo")
SPARSE_LOCO = Method("SparseLoCo")


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
        method: The algorithm.
        fragments: Into which the model is divided.
        delay: Steps after which a fragment's average is applied.
    """

    way: Way
    local_steps: int
    bucket_mb: float
    exchange: float
    step: float
    agreement: float
    sent: float
    codec: Codec | None = None
    method: Method = AVERAGES
    fragments: int = 1
    delay: int = 0


@dataclass(frozen=True)
class Decision:
    """A choice.

    Attributes:
        setting: What was chosen; for DDP its prediction.
        reason: In one line.
        loss: What it costs in accuracy, as far as it was measured, in one line.
        found: All settings that were compared.
    """

    setting: Setting
    reason: str
    loss: str
    found: Sequence[Setting]


def settings(
    network: Network,
    compute: float,
    size: float,
    *,
    local_steps: Sequence[int] = LOCAL_STEPS,
    buckets_mb: Sequence[float] = BUCKETS_MB,
    chosen: Sequence[Way] | None = None,
    codec: Codec | None = None,
    method: Method = AVERAGES,
    fragments: int = 1,
    delay: int = 0,
    margin: float = 1.0,
) -> list[Setting]:
    """Returns every setting of a method with its prediction.

    Args:
        network: The links.
        compute: Seconds of a step alone.
        size: Bytes of the parameters.
        local_steps: To try.
        buckets_mb: MiB of a bucket, to try.
        chosen: The ways to try; by default all that there are. With a codec, those of them that take one.
        codec: Of the exchanges.
        method: The algorithm.
        fragments: As in `Setting`.
        delay: As in `Setting`.
        margin: How many times as long as predicted an exchange may take.
    """
    found = []
    share = 1.0 if codec is None else codec.share
    part = size / fragments
    hidden = (method.hides + delay) * compute
    for way in prediction.ways(network) if chosen is None else chosen:
        if codec is not None and not way.encoded:
            continue
        for megabytes in buckets_mb:
            rounds = [
                margin * exchange_seconds(each, network, part, megabytes * 2**20, codec, way.encoded)
                for each in way.traffic
            ]
            exchange = statistics.fmean(rounds)
            seen = min(1.0, megabytes * 2**20 / part) if method.last_seen else 0.0
            late = statistics.fmean(max(seen * seconds, seconds - hidden) for seconds in rounds)
            tensors = statistics.fmean(
                share * sum(each.between.values()) + sum(each.within.values()) for each in way.traffic
            )
            for steps in local_steps:
                step = compute + fragments * late / steps
                agreement, sent = way.rounds * steps * step, tensors * size / steps
                about = steps, megabytes, exchange, step, agreement, sent, codec
                found.append(Setting(way, *about, method, fragments, delay))
    return found


def longest_step(fastest: float, compute: float, tolerance: float) -> float:
    """Returns the seconds that a step may take by the module's rule, as in `best`."""
    return (1 + tolerance) * (compute if fastest <= (1 + tolerance) * compute else fastest)


def best(found: Sequence[Setting], compute: float, tolerance: float = TOLERANCE) -> Setting:
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


def steps_to_loss(setting: Setting) -> float:
    """Returns how many times DDP's steps a setting needs to a loss, by the steps in which ranks come to agree.

    Between the measured points it grows alike with each doubling, and beyond the last two as between them, which was not
    measured.
    """
    steps = setting.way.rounds * setting.local_steps
    points = list(itertools.pairwise(STEPS_TO_LOSS.items()))
    (a, low), (b, high) = next((pair for pair in points if steps <= pair[1][0]), points[-1])
    return low + (high - low) * math.log(steps / a) / math.log(b / a)


def decide(
    network: Network,
    compute: Sequence[float],
    size: float,
    codecs: Mapping[str, Codec],
    tolerance: float = TOLERANCE,
) -> Decision:
    """Returns what to train with.

    Args:
        network: The links.
        compute: Seconds of a step alone, of each rank: the slowest one counts.
        size: Bytes of the parameters.
        codecs: By the code that makes them. Those of `sparse_code` are for SparseLoCo, the others for averages of parameters.
        tolerance: How much longer a step may take.
    """
    slowest = max(compute)
    chosen = prediction.ways(network)
    averaged = [each for each in LOCAL_STEPS if each <= MOST_AVERAGED]
    groups = [settings(network, slowest, size, local_steps=averaged, chosen=chosen)]
    outer = [each for each in LOCAL_STEPS if each > MOST_AVERAGED]
    groups.append(settings(network, slowest, size, local_steps=outer, chosen=chosen[:1], method=DILOCO))
    sparse = {sparse_code(share): steps for steps, share in SPARSE.items()}
    # Ranks of one host read each other's tensors in place.
    for code, codec in codecs.items() if network.hosts > 1 else ():
        if code not in sparse:
            groups.append(settings(network, slowest, size, local_steps=averaged, chosen=chosen, codec=codec))
            continue
        steps, ways = [sparse[code]], [prediction.complete(network)]
        groups.append(
            settings(network, slowest, size, local_steps=steps, chosen=ways, codec=codec, method=SPARSE_LOCO)
        )
    choice, least = None, math.inf
    for group in groups:
        candidate = best(group, slowest, tolerance)
        cost = candidate.step * steps_to_loss(candidate)
        if cost <= PAYS * least:  # what comes later has to pay
            choice, least = candidate, cost
    assert choice is not None  # the first one, at least
    caps = [DDP_BUCKET_MB]
    (ddp,) = settings(network, slowest, size, local_steps=[1], buckets_mb=caps, chosen=chosen[:1], method=DDP)
    found = [ddp, *(each for group in groups for each in group)]
    if ddp.step <= KEEP_DDP * choice.step:
        beside = f"{1e3 * choice.step:.4g} ms with {choice.way.name}"
        reason = f"DDP hides its all-reduce: {1e3 * ddp.step:.4g} ms a step, {beside}, which needs more steps to a loss"
        return Decision(ddp, reason, loss_of(ddp), found)
    reason = f"{1e3 * choice.step:.4g} ms a step, compute {1e3 * slowest:.4g}, DDP {1e3 * ddp.step:.4g}"
    return Decision(choice, reason, loss_of(choice), found)


def moved(
    groups: Sequence[Sequence[Setting]],
    now: tuple[str, int, str | None],
    compute: float,
    tolerance: float = TOLERANCE,
) -> Setting | None:
    """Returns the setting that a running job moves to by the rule; None if it keeps the one that it has.

    A setting is moved to only if its step is within half of the tolerance, and kept within the whole: else a job whose links
    lie just between two settings would move in every report.

    Args:
        groups: Settings by codec, without one first. A later group has to pay.
        now: The name of the topology, the local steps and the codec that it has.
        compute: Seconds of a step alone.
        tolerance: How much longer a step may take.
    """
    found = [each for group in groups for each in group]
    fastest = min(each.step for each in found)
    allowed, entered = (longest_step(fastest, compute, each) for each in (tolerance, tolerance / 2))
    choice: Setting | None = None
    for group in groups:
        fast = [each for each in group if each.step <= entered]
        candidate = best(fast, compute, tolerance) if fast else None
        if candidate is not None and (choice is None or pays(candidate, choice)):
            choice = candidate
    assert choice is not None  # the fastest one, at least
    for each in found:
        is_now = (each.way.code, each.local_steps, each.codec and each.codec.code) == now
        if is_now and each.step <= allowed and each.agreement <= KEEPS * choice.agreement:
            return None
    return choice


def sparse_code(share: float) -> str:
    """Returns the code of the codec of SparseLoCo that sends a share of the elements."""
    return f"TopK({share}, bits=2)"


def loss_of(setting: Setting) -> str:
    """Returns what a setting costs in accuracy, as docs/algorithms.md and docs/measurements have it, in one line."""
    steps = setting.local_steps
    if setting.method is DDP:
        return "none: all ranks make the same step"
    if setting.method is SPARSE_LOCO:
        if steps <= 4:
            return "with 2 local steps +1.9, -2.3 and +1.7 % for three models beside a ring; 4 did as well in trials"
        return "not measured with so many local steps; 8 with a fourth of the elements were worse than 4"
    if setting.method is DILOCO:
        return f"a small GPT lost 23 % with 16 local steps; {steps} were not measured"
    if steps >= 8:
        cost = "a small task lost 15 % with 8 local steps of local SGD"
    elif steps > 1:
        cost = "AdamW with 4 local steps lost 0.1 points; SGD with 8 lost 15 % on a small task"
    elif setting.way.name == "all-reduce":
        cost = "none with SGD; AdamW lost 5 % at DDP's rate on a small GPT, so keep its moments averaged (no order=)"
    else:
        cost = "16 ranks on a small task: 2 to 3 % in long runs, 2 to 6 % in short ones; more with more ranks"
    if setting.codec is not None and setting.codec.code.startswith("Int8"):
        cost += "; int8 +0.6, -3.9 and +0.2 % for three models"
    return cost
