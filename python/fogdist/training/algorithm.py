"""The frame of all algorithms: steps of the user's optimizer, and the exchanges around them."""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fogdist.agreement import check_same_everywhere
from fogdist.compression import BFloat16, Codec, Float16
from fogdist.context import Context, current
from fogdist.elastic.membership import members_of
from fogdist.elastic.participant import Participant
from fogdist.observe.flight_record import count_step
from fogdist.observe.timeline import shown_as
from fogdist.packing import cap_bytes
from fogdist.parameters import broadcast_module
from fogdist.shards import check_apart, copies_of, local_of, sharded_as
from fogdist.topology.validation import check_choice
from fogdist.training.buckets import FlatBuckets
from fogdist.training.continuing import (
    Continuing,
    OnLoss,
    highest,
)
from fogdist.training.mixing import (
    DynamicWeights,
    Finish,
    GlobalAverage,
    Machines,
    Mixing,
    MixingLike,
    Neighbors,
    NoMixing,
    Round,
    Samples,
    as_mixing,
)
from fogdist.training.saved_state import load_state, save_state
from fogdist.training.view import (
    DistributedOptimizer,
    Models,
    only_makes_state,
    wrap,
)

if TYPE_CHECKING:
    from typing_extensions import Self


# The default of a step's closure: torch.distributed.checkpoint gives None.
_NONE_GIVEN = object()
# The weight of a rank without samples in the mean of all ranks, beside those with some.
_LEAST_WEIGHT = 1e-30


class Tuning(Protocol):
    """What changes an algorithm's mixing and local steps while it trains: `fogdist.tuning.Tuner`."""

    def begin_round(self) -> None:
        """Called at the beginning of a round, before processes join in it."""

    def joined(self) -> None:
        """Called at the beginning of a round, after that."""

    def schedule(self) -> dict[str, int]:
        """Returns the numbers that describe the present setting, the same on all ranks in a round."""

    def members_changed(self, told: Sequence[Mapping[str, int]]) -> None:
        """Called when ranks were lost or have joined.

        Args:
            told: What each rank tells: its rounds, and `schedule`.
        """

    def close(self) -> None:
        """Ends what is in flight. Collective."""


class Batches(Protocol):
    """The batches of which each step uses one: `fogdist.SharedBatches`."""

    def size_of(self, place: int) -> int:
        """Returns how many samples this rank has of the batch of that step."""

    def stop(self) -> None:
        """Called when a step begins, after its closure."""

    def end_step(self) -> None:
        """Called when a step has ended."""

    def restart(self) -> None:
        """Called when the steps go on from another number, on this rank."""

    def paused(self) -> AbstractContextManager[None]:
        """Returns a block whose time is not that of this rank's compute: it waits for others."""


class AlgorithmOptions(TypedDict, total=False):
    """The options that all algorithms have; see `Algorithm`."""

    topology: MixingLike
    local_steps: int
    compression: Codec | None
    group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    on_loss: OnLoss
    broadcast: bool
    by_samples: bool


class Algorithm(DistributedOptimizer):
    """Base of the algorithms: ``x+ = W (x + step(grad f(x)))`` every `local_steps` steps. Collective to make.

    A subclass changes the recursion by overriding `adapt` (a local step), `combine` (the exchange after every
    `local_steps` of them) or `advance` (both). It names the vectors that it keeps for the parameters in
    `state_vectors`, and other numbers in `state_numbers`; ranks save and load them with the optimizer's state. All
    three methods work on `values`, flat vectors with the parameters' values, and autograd does not record them.
    A subclass must declare its attributes in its body; all other attributes belong to the user's optimizer.

    The object is a view of the wrapped optimizer and an instance of its class, so learning-rate schedulers, gradient
    scalers and hooks see the user's optimizer. Attributes of the algorithm come before those of the optimizer: an
    optimizer that has an attribute or a method of such a name is refused. `state_dict` holds the algorithm's state too.
    Training continues from it bit for bit, and it can be loaded into the plain optimizer as well.

    The model stays an ordinary model: nothing of it is replaced, and what is exchanged is a copy of the parameters in flat
    buckets (`fogdist.training.FlatBuckets`), which takes as much memory again. The values of a parameter may change in any
    way; its dtype, device and shape may not. The ranks compare their parameters when the algorithm is created and whenever
    parameters are added, frozen or unfrozen, which all ranks must do alike.

    An algorithm that is made of the same parameters later, as by a notebook's cell that is run again, takes over: hooks and
    windows of this one go, without waiting for other ranks, an exchange in flight is forgotten, and `step` raises.

    All of them live alike: `no_sync` is a block for the passes of a batch that is accumulated, `average` gives all ranks one
    model at the end, and `close`, or the end of a ``with`` block, releases hooks and memory.

    Args:
        optimizer: Any torch optimizer that evaluates its closure once a step; it keeps its state.
        model: The model, or a list of models, that hold its parameters. All trained parameters are averaged,
            buffers are not.
        topology: The peers and weights of the averages, the same on all ranks. A `fogdist.topology.Topology`, or a
            sequence of graphs, gives its rounds, one after the other. A `networkx.DiGraph` is used with its weights in
            all rounds. A string is a name that `fog topology` lists. None uses the attributes `self_weight`,
            `src_weights` and `dst_weights`, which can be set before each step for a dynamic topology, and the group's
            topology as long as they are None. Other choices are `Machines()`, `GlobalAverage()`, `NoMixing()`, or the
            user's own `Mixing`.
        local_steps: J: ranks communicate in every J-th call of `step`.
        compression: A codec of `fogdist.compression` for the messages, as in `Neighbors`.
        group: The group of ranks; by default that of `init`.
        bucket_cap_mb: Size of the buckets in MiB. Each bucket is one message. A larger parameter has its own bucket. None
            for 4 on the CPU and 25 on other devices.
        on_loss: What a step does if a rank of the group is lost or leaves: "raise", or "continue" with the ranks that are
            left. The exchange in flight is then repeated among them, or given up where other ranks had completed it, with
            what is left of the topology (`fogdist.topology.Topology.among`). All ranks must come to a step, or end, within
            the group's timeout. Dynamic weights are not possible. See docs/membership.md.
        broadcast: Whether all ranks begin with the parameters and buffers of rank 0. A process that joins later gets those of
            the ranks that train.
        by_samples: Whether ranks weigh in an average by the samples that they have used since the last one, which the
            attribute `samples` tells; `local_steps` may then differ among ranks. See docs/algorithms.md.

    Attributes:
        samples: With `by_samples`: how many samples the gradient of a step of this rank is the mean of. It is set before a
            step, and holds until it is set anew. None for those of `fogdist.SharedBatches`.

    Raises:
        TypeError: An argument has a wrong type; a parameter is not a dense tensor.
        ValueError: `optimizer` is an LBFGS, is distributed already, has an attribute that the algorithm has too, or a
            parameter that is not in the model; two parameters have the same name; a parameter is a DTensor over ranks of the
            group, or a copy that would not stay one; a number is out of its range; a topology of another number of ranks;
            ranks disagree on the algorithm, its options or the parameters' shapes (on all ranks alike); before `init`.
        RuntimeError: After `shutdown`; torch.distributed.DistBackendError if a rank does not come.
    """

    state_vectors: ClassVar[tuple[str, ...]] = ()
    """Names of flat vectors that are kept from step to step, in `vectors`."""
    state_numbers: ClassVar[Mapping[str, float]] = {}
    """Numbers that are kept, in `numbers`, with their first values."""
    rank_numbers: ClassVar[tuple[str, ...]] = ()
    """The names of numbers that tell what vectors are good for, the same on all ranks at the beginning of a round. The mean of
    all ranks' states has their first values; a process that joins has those that the ranks tell when they let it in."""
    mean_weight: ClassVar[str | None] = None
    """The name of the number that weights this rank's parameters in the mean of all ranks; by default all weigh the same."""
    compared: ClassVar[tuple[str, ...]] = ()
    """The names of a subclass's attributes, set before this class's constructor, that must be the same on all ranks."""
    needs_rates: ClassVar[bool] = False
    """Whether the recursion uses the learning rate; a bucket then has parameters of one group only."""
    runs_alone: ClassVar[bool] = True
    """Whether a group of one rank runs the recursion; if not, its steps are the optimizer's own."""
    saves_state: ClassVar[bool] = True
    """Whether `state_dict` contains the algorithm's state."""
    can_be_joined: ClassVar[bool] = False
    """Whether a process can join the ranks that train by it. All exchanges are then part of a round, every `local_steps`
    calls of `step`, and a subclass whose rounds begin elsewhere calls `enter` there."""
    weighs: ClassVar[bool] = False
    """Whether ranks may weigh by samples: the recursion needs no mean but that of what ranks mix, whatever its weights."""
    takes_compression: ClassVar[bool] = True
    """Whether the mixing may have a codec: the recursion allows that values are off by the codec's error after a round."""
    # Makes a gradient scaler call step() even if gradients overflowed, because neighbors wait for this rank.
    _step_supports_amp_scaling = True

    # Without values in the class, which an object that wraps this one would have in place of those that are set.
    self_weight: float | None
    src_weights: Mapping[int, float] | None
    dst_weights: Iterable[int] | Mapping[int, float] | None
    src_machine_weights: Mapping[int, float] | None
    dst_machine_weights: Iterable[int] | Mapping[int, float] | None
    enable_topo_check: bool

    by_samples: bool
    samples: float | None
    batches: Batches | None  # those of which each step uses one
    shares: list[list[int]]  # of the batches: from which one on, and then the share of each rank
    mixing: Mixing
    local_steps: int
    steps: int
    rounds: int
    overflowed: bool
    vectors: dict[str, list[Tensor]]
    numbers: dict[str, Any]  # floats; tensors of one element a rank where one process holds all ranks
    on_loss: OnLoss
    buckets: FlatBuckets
    is_alone: bool
    is_syncing: bool  # False in no_sync()
    tuning: Tuning | None
    _group: dist.ProcessGroup | None
    _codec: Codec | None
    _participant: Participant | None
    _ends: Participant | None  # of averages of all ranks, begun after different numbers of exchanges
    _number: int
    _described: list[str]
    _bucket_bytes: int | None
    _step_options: dict[str, Any]
    _group_numbers: list[int]
    _has_state: bool
    _loaded: dict[str, dict[Tensor, Tensor]]
    _used: float  # samples since the last round began
    _used_before: list[float]  # those from round to round before that, as many as `rounds_for_all`
    _counted: tuple[int, Samples] | None  # the number of the last round that has begun, and these

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        taken = {
            "algorithm",
            "apart",
            "begun",
            "steps",
            "rounds",
            "used",
            "used_before",
            "shares",
        }.intersection([*cls.state_vectors, *cls.state_numbers])
        if taken:
            raise ValueError(
                f"state_vectors and state_numbers must not be called {sorted(taken)}: the frame saves these"
            )

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        optimizer, model, *_ = _bound(cls, arguments, options).args
        return wrap(cls, optimizer, model)

    def __init__(
        self,
        optimizer: Optimizer,
        model: Models,
        *,
        topology: MixingLike = None,
        local_steps: int = 1,
        compression: Codec | None = None,
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        on_loss: OnLoss = "raise",
        broadcast: bool = True,
        by_samples: bool = False,
    ) -> None:
        self.by_samples = by_samples
        self.samples = self.batches = self._counted = None
        self._used, self._used_before = 0.0, []
        self.shares = []
        self.self_weight = self.src_weights = self.dst_weights = None
        self.src_machine_weights = self.dst_machine_weights = None
        self.enable_topo_check = False
        self.on_loss = on_loss
        self.is_syncing = True
        self.tuning = None
        self._participant = self._ends = None
        context = current(group)
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "optimizer must evaluate its closure once a step, got an LBFGS, which does so several times, and not "
                "equally often on all ranks"
            )
        if self.needs_rates and not all("lr" in each for each in optimizer.param_groups):
            raise ValueError(
                f"optimizer must have a learning rate 'lr' in each group for {self.algorithm_name}, got "
                f"{type(optimizer).__name__} with {sorted(set(optimizer.param_groups[0]) - {'params'})}"
            )
        check_count(local_steps, "local_steps")
        self._bucket_bytes = cap_bytes(bucket_cap_mb)
        self._group = group
        self._codec = codec = getattr(topology, "compression", None) if compression is None else compression
        if codec is not None and not self.takes_compression:
            raise ValueError(f"compression must be None for {self.algorithm_name}, got {codec!r}")
        given = as_mixing(topology, context, compression)
        check_choice(on_loss, "on_loss", OnLoss)
        if on_loss == "continue" and isinstance(given, Machines):
            raise ValueError(
                f"on_loss must be 'raise' with topology={given!r}, whose machines have equally many ranks"
            )
        if by_samples:
            self._check_weighs(given, context)
        self.mixing = context.carried_out(given)
        described = {
            "on_loss": on_loss,
            **({"by_samples": True} if by_samples else {"local_steps": local_steps}),
        }
        described.update((name, getattr(self, name)) for name in self.compared)
        self._described = [*self.mixing.items(context)]
        self._described += [f"{name}={value!r}" for name, value in described.items()]
        self.local_steps = local_steps
        self.is_alone = context.is_alone
        self.numbers = dict(self.state_numbers)
        self.steps = self.rounds = 0
        self.overflowed = False
        self.vectors = {name: [] for name in self.state_vectors}
        self._step_options = {}
        self._has_state = False
        self._loaded = {}
        self._check_shards()
        # Taken only after all local checks: if one rank alone raised after taking a number, ranks would count
        # differently.
        self._number = context.next_number()
        self._fog_title = self.name
        if context.is_joining and not (on_loss == "continue" and self.is_joinable()):
            raise ValueError(
                f"this process joins a running job, and {self.algorithm_name} with on_loss={on_loss!r} cannot be joined; "
                "docs/membership.md has what can be"
            )
        if on_loss == "continue":
            state = _State(self) if self.is_joinable() else None
            self._participant = members_of(group).participant(self.name, state)
            self._participant.on_change(self._fog_on_change)
            self._ends = members_of(group).participant(f"{self.name} global")
            self.mixing = self._fog_lasting(self.mixing)
        if self.is_running:
            self._hold()
            if broadcast and context.size > context.held and not context.is_joining:
                with self.buckets.released_on_error():
                    for each in self._fog_models:
                        broadcast_module(each, group=group)
                self.buckets.load()

    # --- for subclasses to override ---

    def advance(self) -> Any:
        """Makes one step: adapts, and combines if it is due."""
        result = self.adapt()
        if self.count_step():
            self.combine()
            self.rounds += 1
        return result

    def adapt(self) -> Any:
        """Makes a local step, unless gradients overflowed; returns the result of the optimizer's own step."""
        if self.overflowed:
            return None
        self.buckets.write_changes()
        result = self._fog_own_step(**self._step_options)
        self.buckets.outdate()
        return result

    def combine(self) -> None:
        """Makes the exchange that follows every `local_steps` local steps."""
        self.mix(self.values, in_place=True)

    def initial(self, name: str) -> list[Tensor]:
        """Returns the values of one of `state_vectors` before the first step with these parameters; default: zeros."""
        return self.buckets.zeros()

    def is_joinable(self) -> bool:
        """Returns whether a process can join the ranks that train by it, with these arguments."""
        return self.can_be_joined

    @property
    def mixes_before_step(self) -> bool:
        """Whether a round has the parameters from before the local step, whose samples then count in the next one."""
        return self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether a round begins elsewhere than at the beginning of a step: with a forward pass, or after the local step."""
        return False

    @property
    def rounds_for_all(self) -> int:
        """The number of rounds in which all parameters are exchanged once."""
        return 1

    def round_schedule(self) -> dict[str, int]:
        """Returns the attributes that may have changed since the constructor, on all ranks alike. A process that joins takes them."""
        return {}

    def is_round_due(self) -> bool:
        """Returns whether a round belongs to the next step."""
        return self.has_round(self.steps + 1)

    def has_round(self, step: int) -> bool:
        """Returns whether a round belongs to a step; the first one is step 1."""
        return step % self.local_steps == 0

    def enter(self) -> bool:
        """Lets processes join at the beginning of a round; on one that joins, joins. Returns whether this one has."""
        if self.tuning is not None:
            self.tuning.begin_round()
        has_joined = self._participant is not None and self.can_be_joined and self._participant.enter()
        if has_joined:
            # They were for changes of parameters that this process no longer has.
            self._used, self._used_before = 0.0, []
        if self.tuning is not None:
            self.tuning.joined()
        return has_joined

    def await_all(self) -> None:
        """Returns when all ranks have called it; with ``on_loss="continue"``, all that are left. Collective."""
        if self._ends is None:
            self.context.group.barrier().wait()
        else:
            self._fog_highest(0, "barrier")

    def keeps_copies(self) -> bool:
        """Returns whether ranks with copies of a tensor, whose neighbors have copies too, get the same averages of it.

        A message has several buckets, of which some may be no copies, so its codec must take each element by itself.
        """
        return self._codec is None or isinstance(self._codec, (BFloat16, Float16))

    def members_changed(self) -> None:
        """Called after ranks were lost, before an exchange that has failed is repeated; default: nothing.

        Some ranks may have completed the last exchange and others not. A subclass whose vectors have a sum that exchanges
        preserve, or numbers that are weights in one, begins them anew.
        """

    # --- for subclasses to use ---

    @property
    def values(self) -> list[Tensor]:
        """Returns the parameters as flat vectors; what is written to them becomes the parameters' in the step."""
        return self.buckets.values()

    def write(self, vectors: Sequence[Tensor]) -> None:
        """Gives the parameters the values of vectors that are like `values`."""
        for mine, vector in zip(self.values, vectors, strict=True):
            mine.copy_(vector)

    def gradients(self) -> list[Tensor]:
        """Returns the gradients as vectors like `values`, which the caller may change; zeros where there is none.

        Raises:
            ValueError: A gradient is not dense.
        """
        return self.buckets.gradients()

    def rates(self) -> list[float]:
        """Returns the current learning rate of each vector; for an algorithm with `needs_rates`."""
        groups = self._fog_wrapped.param_groups
        return [float(groups[place]["lr"]) for place in self.buckets.group_of]

    def count_step(self) -> bool:
        """Counts a step and returns whether ranks are to communicate in it."""
        is_due = self.is_round_due()
        self.steps += 1
        return is_due

    def mix(
        self, tensors: Sequence[Tensor], mixing: Mixing | None = None, *, in_place: bool = False
    ) -> list[Tensor]:
        """Returns this round's weighted averages, by the algorithm's own mixing or another one.

        Args:
            tensors: This rank's values, with the same shapes and dtypes as the neighbors'. They are sent in one exchange.
            mixing: By default the algorithm's mixing.
            in_place: Whether the averages are written into the tensors themselves.
        """
        return self._fog_begin(tensors, mixing, self.this_round(), in_place)()

    def begin_mix(self, tensors: Sequence[Tensor], *, in_place: bool = False) -> Finish:
        """Begins what `mix` makes; returns a function that waits for the averages and returns them.

        Args:
            tensors: As in `mix`. They must not change before the exchange has ended.
            in_place: As in `mix`.
        """
        return self._fog_begin(tensors, None, self.this_round(), in_place)

    def step_along(self, directions: Sequence[Tensor]) -> Any:
        """Makes the optimizer's own step with `directions` in place of the gradients, which are restored afterwards.

        A parameter without a gradient whose direction is zero is left without one, so that weight decay does not change
        it.

        Args:
            directions: Vectors like `values`; the optimizer may overwrite them.
        """
        pairs = list(self.buckets.pieces(directions))
        kept = [(parameter, parameter.grad) for parameter, _ in pairs]
        missing = [direction for parameter, direction in pairs if parameter.grad is None]
        moves = iter(_have_nonzero(missing))
        self.buckets.write_changes()
        for parameter, direction in pairs:
            if parameter.grad is not None or next(moves):
                parameter.grad = sharded_as(parameter, direction)
        try:
            return self._fog_own_step(**self._step_options)
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
            self.buckets.outdate()

    def this_round(self) -> Round:
        """Returns the current round, with the weights that the user has set for it.

        Raises:
            ValueError: A weight is set that the mixing does not use.
        """
        self.weights().check_taken(self.mixing)
        begun = Round.of(self.context, self.rounds, self.name, self.weights())
        return replace(begun, samples=self._samples_of_round())

    def weights(self) -> DynamicWeights:
        """Returns the weights that the user has set for the next round."""
        return DynamicWeights(
            self.self_weight,
            self.src_weights,
            self.dst_weights,
            self.src_machine_weights,
            self.dst_machine_weights,
            self.enable_topo_check,
        )

    @property
    def context(self) -> Context:
        """The current context of the group; after a loss with "continue", of the ranks that are left."""
        return current(self._group) if self._participant is None else self._participant.context

    @property
    def name(self) -> str:
        """The name of this object, the same on all ranks."""
        return f"fogdist.{self.algorithm_name} {self._number}"

    @property
    def algorithm_name(self) -> str:
        """The name of the algorithm's class; the object's own class has the name of the user's optimizer."""
        return type(self._fog_view()).__mro__[1].__name__

    @property
    def is_running(self) -> bool:
        """Whether steps run the recursion; otherwise they are the optimizer's own."""
        return self.runs_alone or not self.is_alone

    # --- for users to call, beside the interface of an optimizer ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block for all passes but the last of a batch that is accumulated: they begin no exchange and are not counted.

        With ``order="cta"``, whose average comes before the pass, these passes see the parameters before the average.

        `step` raises RuntimeError within it; for steps without an exchange there is `local_steps`.
        """
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def average(self, buffers: bool = True) -> None:
        """Gives the models of all ranks the mean of their trained parameters and floating-point buffers. Collective.

        Call it once, after the last step, before a model is evaluated or saved. It completes exchanges in flight first, and it
        is the exact mean over the ranks, with the weights of push-sum where an algorithm has them. Counts, such as
        `num_batches_tracked`, stay as each rank has them.

        Args:
            buffers: False to leave buffers as each rank has them.

        Raises:
            RuntimeError: The optimizer has been closed or replaced; torch.distributed.DistBackendError if a rank does not
                come.
        """
        self._fog_check_not_replaced()
        self.settle()
        given = {each: None for model in self._fog_models for each in model.buffers()} if buffers else {}
        averaged = [local_of(each) for each in given if each.is_floating_point() or each.is_complex()]
        with torch.no_grad():
            if self.is_alone:
                return
            self.refresh()
            # Ranks that train at their own pace have made different numbers of rounds.
            last, participant = Round(self.context, 0, f"{self.name} average"), self._ends
            means = []
            for values in self.values:
                own = self.own_weight
                weight = torch.tensor([own], dtype=torch.float64, device="cpu")
                sent = [values * own, weight]
                total, weight = self._fog_begin(sent, GlobalAverage(), last, True, participant)()
                means.append(total.div_(float(weight)))
            self._fog_begin(averaged, GlobalAverage(), last, True, participant)()
            self.write(means)  # not before, as the loss of a rank meanwhile may have loaded the buckets anew
            self.buckets.write_changes()

    def close(self) -> None:
        """Completes what is in flight and releases hooks, windows and memory. Collective.

        The parameters keep their values, and `step` raises RuntimeError from then on. The end of a ``with`` block calls it; if
        the block raises, nothing is waited for. A second call does nothing.

        Raises:
            torch.distributed.DistBackendError: A rank does not come; all is released all the same.
        """
        if self._fog_ended:
            return
        try:
            self._fog_finish()
        finally:
            self._fog_give_up()
            self._fog_ended = "was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        elif not self._fog_ended:
            self._fog_give_up()
            self._fog_ended = "was closed"

    # --- the interface of an optimizer ---

    @shown_as("step")
    def step(self, closure: Any = _NONE_GIVEN, **options: Any) -> Any:
        """Makes a step of the algorithm.

        Where a gradient scaler finds an overflow, the rank leaves out its own local step, but counts the step and
        communicates.

        Args:
            closure: A closure, evaluated once, before anything is done; or nothing.
            **options: Other options of the optimizer's own step.

        Returns:
            The result of the closure if there is one, otherwise the result of the optimizer's own step.

        Raises:
            ValueError: An attribute of weights is set that the mixing does not use, or `samples` is none; nothing has been
                done then.
            RuntimeError: The optimizer was closed, or another one has taken over the model; within `no_sync`.
        """
        self._fog_check_not_replaced()
        self._check_syncing()
        if closure is None and not options and only_makes_state(self._fog_wrapped):
            result = self._fog_own_step(closure=None)
            self.accept_changes()
            return result
        used = self._samples_of_step()
        closure, self._step_options = (None if closure is _NONE_GIVEN else closure), options
        loss = self._fog_evaluated(closure)
        if self.batches is not None:
            self.batches.stop()
        if closure is not None and _needs_closure(self._fog_wrapped):
            self._step_options["closure"] = lambda: loss
        try:
            with torch.no_grad():
                self.weights().check_taken(self.mixing)
                self.overflowed = self._fog_unscale()
                if self.is_running:
                    self.refresh()
                    # A round that has begun with the forward pass has the values from before this step.
                    if not self.mixes_before_step and not self.overflowed:
                        self._used += used
                    # A process that has just joined has others' parameters now, and gradients of its own ones.
                    if not self.overlaps and self.is_round_due() and self.enter():
                        self.overflowed = True
                    result = self.advance()
                    self.buckets.write_changes()
                    if self.mixes_before_step and not self.overflowed:
                        self._used += used
                else:
                    result = None if self.overflowed else self._fog_own_step(**self._step_options)
        except BaseException:
            self._fog_forget_scaler()
            raise
        finally:
            self._step_options = {}  # frees a closure, which may hold a batch
        count_step()
        if self.batches is not None:
            self.batches.end_step()
        return result if closure is None else loss

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state dict with additional entries for the algorithm's state.

        The state of each parameter, and the first parameter group, have entries that begin with "fog_". Before the first
        step the vectors are zeros, which are not loaded. They are needed for ``torch.distributed.checkpoint``, which
        loads only entries that exist already.
        """
        saved = self.plain_state_dict()
        if not self.saves_state:
            return saved
        pieces, numbers = self._pieces(), {"steps": self.steps, "rounds": self.rounds, **self.numbers}
        if self.by_samples:
            numbers.update(used=self._used, used_before=self._used_before)
        if self.shares:
            numbers["shares"] = self.shares
        if self.state_vectors:
            numbers["begun"] = int(bool(pieces))
        if not pieces and self.is_running:
            pieces = {name: dict(self.buckets.pieces(self.buckets.zeros())) for name in self.state_vectors}
        return save_state(saved, self._fog_wrapped, self.algorithm_name, pieces, numbers)

    def plain_state_dict(self) -> dict[str, Any]:
        """Returns the state dict from which the plain optimizer continues: by default its own."""
        return self._fog_wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this algorithm, or of the plain optimizer: the algorithm then begins anew.

        The parameters and the algorithm's state belong together: load both, of the same step.

        Raises:
            ValueError: It is another algorithm's, or as `load_state_dict` of the optimizer.
        """
        loaded, numbers = load_state(state_dict, self._fog_wrapped, self.algorithm_name, self.state_vectors)
        self._has_state = False
        self.vectors = {name: [] for name in self.state_vectors}
        self._loaded = loaded if numbers.get("begun", True) else {}
        self.steps, self.rounds = int(numbers.get("steps", 0)), int(numbers.get("rounds", 0))
        self.numbers = {name: numbers.get(name, value) for name, value in self.state_numbers.items()}
        self._used, self._used_before = float(numbers.get("used", 0.0)), list(numbers.get("used_before", ()))
        self._counted = None
        self.shares = [list(each) for each in numbers.get("shares", ())]
        if self.batches is not None:
            self.batches.restart()

    def refresh(self) -> None:
        """Takes up parameters that were added, unfrozen or changed, and forgets those that were frozen.

        The algorithm's state begins here too, at the first step: not before the user has loaded or broadcast
        what ranks start from.
        """
        # The loaded state, or the state of the parameters that are kept.
        known = self._loaded
        if self._holds(*self._trained()):
            self.buckets.check_kinds()
            self.buckets.outdate()
            if self._has_state:
                return
        else:
            known = known or self._pieces()
            self._check_shards()
            self._hold()
        for name in self.state_vectors:
            self.vectors[name] = self.initial(name)
            for parameter, piece in self.buckets.pieces(self.vectors[name]):
                if parameter in known.get(name, {}):
                    piece.copy_(known[name][parameter])
        self._loaded = {}
        self._has_state = True

    @property
    def own_weight(self) -> float:
        """The weight of this rank's parameters in the mean of all ranks; see `mean_weight`."""
        if self.by_samples:
            is_between = self.mixes_before_step or not self.has_round(self.steps)
            counts = [*self._used_before, self._used] if is_between else self._used_before
            # If no rank has used any, all weigh the same.
            return max(sum(counts[-self.rounds_for_all :]), _LEAST_WEIGHT)
        return 1.0 if self.mean_weight is None else float(self.numbers[self.mean_weight])

    def accept_changes(self) -> None:
        """Accepts changes of the parameters while an exchange of them is in flight, without a warning."""

    def settle(self) -> None:
        """Ends exchanges in flight, so that parameters and state have all that there is: before a checkpoint. Collective."""

    # --- inside ---

    def _check_weighs(self, mixing: Mixing, context: Context) -> None:
        """Raises ValueError if ranks cannot weigh by samples with this mixing."""
        if not self.weighs:
            raise ValueError(
                f"by_samples must be False for {self.algorithm_name}, whose recursion needs equal weights"
            )
        if not mixing.weighs:
            raise ValueError(f"by_samples must be False with topology={mixing!r}, whose weights are its own")
        if isinstance(mixing, Neighbors):
            mixing.check_symmetric(context)

    def _samples_of_step(self) -> float:
        """Returns how many samples the next step's gradient is the mean of; 0 where ranks do not weigh by them."""
        if not self.by_samples:
            return 0.0
        if self.samples is None and self.batches is not None:
            return float(self.batches.size_of(self.steps))
        if self.samples is None:
            raise ValueError(
                "samples must be set before step() with by_samples=True, for example to len(batch)"
            )
        return check_factor(self.samples, "samples")

    def _samples_of_round(self) -> Samples | None:
        """Returns this rank's samples since the last exchange of the same parameters, when a round begins.

        None where ranks do not weigh by them.
        """
        if not self.by_samples:
            return None
        if self._counted is None or self._counted[0] != self.rounds:
            self._used_before = [*self._used_before, self._used][-self.rounds_for_all :]
            self._used = 0.0
            name = Round.of(self.context, self.rounds, self.name).name
            self._counted = self.rounds, Samples(sum(self._used_before), name)
        return self._counted[1]

    def _fog_begin(
        self,
        tensors: Sequence[Tensor],
        mixing: Mixing | None,
        round: Round,
        in_place: bool,
        participant: Participant | None = None,
    ) -> Finish:
        """Begins the exchange of a round; see `mix`. `participant` is its place in the exchanges, if not that of rounds."""
        chosen = self.mixing
        if self.is_alone:
            chosen = NoMixing()
        elif mixing is not None:
            chosen = self._fog_lasting(self.context.carried_out(mixing), participant)
        return chosen.begin(tensors, round, in_place)

    def _fog_lasting(self, mixing: Mixing, participant: Participant | None = None) -> Mixing:
        """Returns a mixing that goes on after losses, if this object does."""
        chosen = participant or self._participant
        return mixing if chosen is None else Continuing(mixing, chosen)

    def _fog_highest(self, number: int, what: str) -> int:
        """Returns the largest of all ranks' numbers; this rank's own if others had got it before a loss. Collective."""
        most = highest(self.context, self._ends, [number], f"{self.name} {what}")
        return number if most is None else most[0]

    def _fog_own_step(self, **options: Any) -> Any:
        """Makes the step of the user's optimizer."""
        return self._fog_wrapped.step(**options)

    def _check_syncing(self) -> None:
        if not self.is_syncing:
            raise RuntimeError(
                "step() must not be called within no_sync(); local_steps=J makes steps without an exchange"
            )

    def _fog_on_change(self) -> None:
        if self.tuning is not None and self._participant is not None:
            self.tuning.members_changed(self._participant.told)
        with torch.no_grad():
            self.members_changed()

    def _fog_finish(self) -> None:
        """Completes what is in flight, before `close` releases all. Collective."""
        self.settle()
        if self.tuning is not None:
            self.tuning.close()

    def _fog_give_up(self) -> None:
        """Releases the parameters to another owner; see the class. A subclass also ends its hooks and windows."""
        super()._fog_give_up()
        if self.is_running:
            self.buckets.release()

    def _trained(self) -> tuple[list[Tensor], list[int]]:
        """Returns the parameters that are not frozen, and the group number of each; all 0 if groups do not matter."""
        pairs = [
            (parameter, place if self.needs_rates else 0)
            for place, group in enumerate(self._fog_wrapped.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        return [parameter for parameter, _ in pairs], [number for _, number in pairs]

    def _holds(self, parameters: Sequence[Tensor], numbers: Sequence[int]) -> bool:
        return self.buckets.holds(parameters) and self._group_numbers == numbers

    def _hold(self) -> None:
        """Makes buckets for the parameters. Collective: ranks compare their layout, and all that describes the algorithm."""
        parameters, numbers = self._trained()
        buckets = FlatBuckets(
            parameters,
            self._bucket_bytes,
            names=[self._fog_names[parameter] for parameter in parameters],
            groups=numbers,
            owner=self._fog_view(),
        )
        if self.context.size > 1:
            self._agree_on(buckets)
        buckets.take_over()
        # Set only after ranks agree; otherwise the next step would not compare again.
        self.buckets, self._group_numbers = buckets, numbers

    def _check_shards(self) -> None:
        """Raises ValueError for DTensors over ranks that mix, and for copies that averages would make different."""
        names = {parameter: self._fog_names[parameter] for parameter in self._trained()[0]}
        for parameter, name in names.items():
            check_apart(parameter, repr(name), self.context.group)
        copies = {copies_of(parameter): name for parameter, name in names.items()}
        has_shards = copies.keys() != {None}
        copies.pop((), None)
        if has_shards and copies and not self.keeps_copies():
            how = "these arguments" if self._codec is None else f"compression={self._codec!r}"
            raise ValueError(
                f"model must be sharded in all of its parameters for {self.algorithm_name} with {how}, got "
                f"{next(iter(copies.values()))!r}, of which other ranks have copies: they would become different"
            )

    def _agree_on(self, buckets: FlatBuckets) -> None:
        """Compares all that describes the algorithm among the ranks, and tells it to processes that join. Collective."""
        described = [self.name, *self._described, *buckets.layout()]
        if self._participant is None:
            check_same_everywhere(self.context.backend, "model", described)
        else:
            members_of(self._group).check_same(self.name, "model", described)

    def _pieces(self) -> dict[str, dict[Tensor, Tensor]]:
        if self._loaded or not self._has_state:
            return self._loaded
        return {name: dict(self.buckets.pieces(vectors)) for name, vectors in self.vectors.items()}


class _State:
    """What a process that joins gets (`fogdist.membership.Joinable`): the models, the optimizer and the algorithm's own state,
    and its numbers of steps and rounds.

    Args:
        algorithm: The algorithm, which this does not keep alive.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm: Algorithm = weakref.proxy(algorithm)

    def save(self) -> dict[str, Any]:
        """See `Joinable`."""
        models = [model.state_dict() for model in self._algorithm._fog_models]
        return {"models": models, "optimizer": self._algorithm.state_dict()}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """See `Joinable`."""
        for model, values in zip(self._algorithm._fog_models, state["models"], strict=True):
            model.load_state_dict(values)
        self._algorithm.load_state_dict(state["optimizer"])
        self._algorithm.refresh()

    def counts(self) -> dict[str, int]:
        """See `Joinable`."""
        algorithm = self._algorithm
        numbers = {name: int(algorithm.numbers[name]) for name in algorithm.rank_numbers}
        for place, share in enumerate(itertools.chain(*algorithm.shares)):
            numbers[f"share {place}"] = share
        return {
            "steps": algorithm.steps,
            "rounds": algorithm.rounds,
            "shares": len(algorithm.shares),
            **algorithm.round_schedule(),
            **({} if algorithm.tuning is None else algorithm.tuning.schedule()),
            **numbers,
        }

    def set_counts(self, counts: dict[str, int]) -> None:
        """See `Joinable`."""
        algorithm = self._algorithm
        schedule = algorithm.round_schedule()
        for name in schedule:
            setattr(algorithm, name, counts[name])
        algorithm.steps, algorithm.rounds = counts["steps"], counts["rounds"]
        # The round that begins is due on this rank too, where ranks make different numbers of local steps.
        while algorithm.by_samples and not algorithm.is_round_due():
            algorithm.steps += 1
        told = [
            counts[f"share {place}"] for place in range(sum(name.startswith("share ") for name in counts))
        ]
        length = len(told) // max(counts["shares"], 1)
        algorithm.shares = [told[begin : begin + length] for begin in range(0, len(told), length or 1)]
        if algorithm.batches is not None:
            algorithm.batches.restart()
        algorithm.numbers.update({name: counts[name] for name in algorithm.rank_numbers})
        if schedule != algorithm.round_schedule():
            algorithm.refresh()


def check_count(value: int, argument: str) -> None:
    """Raises TypeError unless `value` is an int, ValueError unless it is at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, got {value}")


def check_factor(value: float, argument: str, *, below: float = math.inf, positive: bool = False) -> float:
    """Returns a number that is at least 0 and below `below`, as a float.

    Raises:
        TypeError: Not a real number.
        ValueError: Out of this range, or 0 where it must be positive.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
    if not 0.0 <= value < below or (positive and value == 0.0):
        least = "more than 0" if positive else "at least 0"
        most = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{argument} must be {least}{most}, got {value}")
    return float(value)


def _bound(called: type[Algorithm], arguments: Any, options: dict[str, Any]) -> inspect.BoundArguments:
    """Returns the arguments of a constructor by name.

    Raises:
        TypeError: One is missing or unknown. Python's own error would name the base class that takes the options.
    """
    known: dict[str, inspect.Parameter] = {}
    for base in called.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None:
            continue
        own = list(inspect.signature(constructor).parameters.values())[1:]
        has_places = any(each.kind is each.POSITIONAL_OR_KEYWORD for each in known.values())
        for each in own:
            if each.kind is each.KEYWORD_ONLY or (each.kind is each.POSITIONAL_OR_KEYWORD and not has_places):
                known.setdefault(each.name, each)
        if all(each.kind is not each.VAR_KEYWORD for each in own):
            break  # it passes no options on to its own bases
    try:
        return inspect.Signature(sorted(known.values(), key=lambda each: each.kind)).bind(
            *arguments, **options
        )
    except TypeError as error:
        raise TypeError(f"{called.__name__}() {error}; it takes {', '.join(known)}") from None


def _needs_closure(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's own `step` cannot be called without a closure."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _have_nonzero(tensors: Sequence[Tensor]) -> list[bool]:
    """Returns whether each tensor has a nonzero element. The host waits once, if all are on one device."""
    answers = [tensor.any() for tensor in tensors]
    found: list[bool] = (
        torch.stack([each.to(answers[0].device) for each in answers]).tolist() if answers else []
    )
    return found
