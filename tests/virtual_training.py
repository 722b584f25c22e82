"""Virtual ranks: decentralized training of one to thousands of ranks in one process, for tests and for time_to_loss.py.

One tensor holds all ranks' parameters, a row each; gradients come from ``torch.func.vmap``. Algorithms and topologies are
those of real ranks: only the exchange is another, a product with the mixing matrix of the round. Time is no part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fogdist.algorithms import DecentralizedSGD
from fogdist.context import Context
from fogdist.static_topology import see_topology
from fogdist.topology import Topology, exponential
from fogdist.training.algorithm import Algorithm
from fogdist.training.fragments import _divided, layer_of
from fogdist.training.mixing import Finish, GlobalAverage, Mixing, Neighbors, NoMixing, Round
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# A matrix with more than this share of nonzero entries is multiplied as it is. For a sparse one, each entry costs a pass
# over two rows; the library's product of dense matrices is some times faster for each entry.
_DENSE_ABOVE = 0.25
# How many rounds' matrices are kept: periods of sequences are shorter mostly.
_KEPT_ROUNDS = 64


class VirtualRanks(Context):
    """A group of ranks that this process holds all: give it to an algorithm as `group`; it needs no `fogdist.init`.

    The parameters of the algorithm, and all vectors that it keeps and averages, must have one row for each rank. A mixing
    then multiplies the rows by its matrix. Algorithms with windows are refused, as is a user's own `Mixing`.

    Args:
        size: Number of ranks.
        samples: How many each uses in a step, by which averages weigh, as those of real ranks do with ``by_samples=True``;
            None for equal weights.
    """

    def __init__(self, size: int, samples: Sequence[int] | None = None) -> None:
        nobody: Any = _OneProcess()
        super().__init__(nobody, nobody, 0, size, [0] * size, see_topology(exponential(size), None, 0, size))
        self._samples = None if samples is None else np.array(samples, dtype=float)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def held(self) -> int:
        return self.size

    def carried_out(self, mixing: Any) -> Any:
        return mixing if isinstance(mixing, RowMixing) else RowMixing(mixing, self.size, self._samples)


class _OneProcess:
    """What virtual ranks have for a backend: their one process agrees with itself, and sends nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"group must be of real ranks for {name}: virtual ranks have neither messages nor windows, only the averages "
            "of algorithms that go in step"
        )

    def agree(self, sums: Tensor, *, name: str = "") -> _Done:
        return _Done()


class _Done:
    """Work that is done."""

    def wait(self) -> None:
        """Returns at once."""


class RowMixing(Mixing):
    """What `Neighbors`, `GlobalAverage` or `NoMixing` does to ranks that are rows: in each round the product with its matrix."""

    def __init__(self, mixing: Any, size: int, samples: np.ndarray[Any, Any] | None = None) -> None:
        if type(mixing) not in (Neighbors, GlobalAverage, NoMixing):
            raise TypeError(
                "topology must be a fogdist.topology.Topology, a networkx.DiGraph, GlobalAverage(), NoMixing() or None "
                f"for virtual ranks, got {mixing!r}"
            )
        self._mixing = mixing
        self._size = size
        self._samples = samples
        self._topology: Topology | None = mixing.topology if isinstance(mixing, Neighbors) else None
        if self._topology is not None and self._topology.size != size:
            raise ValueError(f"topology must have as many nodes as ranks, {size}, got {self._topology.size}")
        self._kept: dict[tuple[int, bool, torch.dtype, torch.device], Tensor] = {}

    def __repr__(self) -> str:
        return repr(self._mixing)

    def items(self, context: Context) -> list[str]:
        return []  # one process has nobody to compare with

    def begin(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        return self._products(tensors, round, in_place, is_push=False)

    def begin_push(self, tensors: Sequence[Tensor], round: Round, in_place: bool = False) -> Finish:
        return self._products(tensors, round, in_place, is_push=True)

    def _products(self, tensors: Sequence[Tensor], round: Round, in_place: bool, *, is_push: bool) -> Finish:
        mixed = [self._product(tensor, round, is_push) for tensor in tensors]
        if not in_place:
            return lambda: mixed

        def finish() -> list[Tensor]:
            for tensor, result in zip(tensors, mixed):
                tensor.copy_(result)
            return list(tensors)

        return finish

    def _product(self, tensor: Tensor, round: Round, is_push: bool) -> Tensor:
        if tensor.numel() % self._size:
            raise ValueError(
                f"tensors must have a row for each of {self._size} ranks, got one of shape {tuple(tensor.shape)}"
            )
        if isinstance(self._mixing, NoMixing):
            return tensor.clone()
        rows = tensor.view(self._size, -1)
        if isinstance(self._mixing, GlobalAverage):
            if self._samples is None:
                mean = rows.mean(dim=0, keepdim=True)
            else:
                mean = rows.new_tensor(self._samples / self._samples.sum()) @ rows
            return mean.expand_as(rows).reshape(tensor.shape)
        operator, codec = self._operator(round, is_push, tensor), self._mixing.compression
        if codec is None:
            return (operator @ rows).view(tensor.shape)
        # As `Neighbors` has it: what a rank keeps of itself is what its message says, and the rest stays here.
        messages = torch.stack([codec.decode(codec.encode(row), row.shape, row.dtype) for row in rows])
        return (rows - messages + operator @ messages).view(tensor.shape)

    def _operator(self, round: Round, is_push: bool, like: Tensor) -> Tensor:
        """The transposed matrix of a round, as `like` needs it: a row is a receiver."""
        topology = self._topology
        if topology is None:
            # Which the user may set anew at any time.
            return self._made(round.context.topology.as_topology().matrix(), is_push, like)
        number = round.number % topology.period
        key = (number, is_push, like.dtype, like.device)
        if key not in self._kept:
            if len(self._kept) >= _KEPT_ROUNDS:
                self._kept.clear()
            self._kept[key] = self._made(topology.matrix(number), is_push, like)
        return self._kept[key]

    def _made(self, matrix: np.ndarray[Any, Any], is_push: bool, like: Tensor) -> Tensor:
        if self._samples is not None:
            matrix = _weighted(matrix, self._samples)
        return as_operator(_pushed(matrix, is_push), like)


def as_operator(matrix: np.ndarray[Any, Any], like: Tensor) -> Tensor:
    """Returns the transpose of a mixing matrix, sparse if it is: ``as_operator(W, X) @ X`` are all ranks' averages."""
    senders, receivers = np.nonzero(matrix)
    if len(senders) > _DENSE_ABOVE * matrix.size:
        return torch.tensor(matrix.T, dtype=like.dtype, device=like.device)
    weights = torch.tensor(matrix[senders, receivers], dtype=like.dtype)
    places = torch.tensor(np.stack([receivers, senders]))
    made = torch.sparse_coo_tensor(places, weights, matrix.shape, device=like.device, check_invariants=False)
    return made.coalesce()


def _weighted(matrix: np.ndarray[Any, Any], samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The matrix of averages that weigh by samples, of a symmetric one: a rank gives less to one that has used more."""
    weighted = matrix * np.minimum(1.0, samples[:, None] / samples)
    np.fill_diagonal(weighted, 0.0)
    return weighted + np.diag(1.0 - weighted.sum(axis=0))


def _pushed(matrix: np.ndarray[Any, Any], is_push: bool) -> np.ndarray[Any, Any]:
    """The matrix of push-sum along the edges of another one: a rank and its out-neighbors get equal shares."""
    if not is_push:
        return matrix
    edges = matrix != 0
    np.fill_diagonal(edges, True)
    return edges / edges.sum(axis=1, keepdims=True)


class GradientAverage(Algorithm):
    """Parallel SGD with the mean of all ranks' gradients, as DistributedDataParallel makes it."""

    def advance(self) -> Any:
        self.count_step()
        self.rounds += 1
        return self.step_along(self.mix(self.gradients(), GlobalAverage(), in_place=True))


class StackedModel(nn.Module):
    """A model with parameters for each rank, and forward passes of all ranks by ``torch.func.vmap``.

    All trained parameters are in one of shape (ranks, elements): row r is rank r's. So the step of an optimizer that treats
    each element by itself (SGD with momentum, Adam, AdamW) is the step of each rank's own optimizer. Frozen parameters and
    buffers are the same on all ranks. Dropout differs between ranks.

    Args:
        model: It is copied.
        ranks: Number of ranks.
        fragments: For an algorithm with so many: they are in so many parameters, each of the layers of a fragment.
    """

    def __init__(self, model: nn.Module, ranks: int, fragments: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        # Not a module of this one: its parameters are not trained.
        self._model = (copy.deepcopy(model),)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sizes: dict[str, int] = {}
        for name, p in trained.items():
            sizes[layer_of(name)] = sizes.get(layer_of(name), 0) + p.numel()
        fragment_of = dict(zip(sizes, _divided(list(sizes.values()), fragments, "interleaved"), strict=True))
        self._shapes = [
            {name: p.shape for name, p in trained.items() if fragment_of[layer_of(name)] == fragment}
            for fragment in range(fragments)
        ]
        rows = [torch.cat([trained[name].detach().reshape(-1) for name in shapes]) for shapes in self._shapes]
        self.stacks = nn.ParameterList(row.repeat(ranks, 1) for row in rows)

    def forward(self, *inputs: Tensor) -> Any:
        """Returns what each rank's model makes of its inputs, which have a leading dimension of ranks."""
        if self.training:
            self.check_statistics()

        def call(parameters: dict[str, Tensor], *own: Tensor) -> Any:
            return torch.func.functional_call(self._model[0], parameters, own)

        return torch.func.vmap(call, randomness="different")(self.parameters_of_ranks(), *inputs)

    def parameters_of_ranks(self) -> dict[str, Tensor]:
        """Returns the trained parameters by name, views of `stacks` of shape (ranks, *shape) each."""
        found = {}
        for stack, shapes in zip(self.stacks, self._shapes, strict=True):
            parts = torch.split(stack, [shape.numel() for shape in shapes.values()], dim=1)
            for part, (name, shape) in zip(parts, shapes.items(), strict=True):
                found[name] = part.reshape(self.ranks, *shape)
        return found

    @property
    def stacked(self) -> Tensor:
        """All ranks' parameters, of shape (ranks, elements)."""
        return self.stacks[0] if len(self.stacks) == 1 else torch.cat(list(self.stacks), dim=1)

    @torch.no_grad()
    def model_of(self, rank: int | None = None) -> nn.Module:
        """Returns a copy of the model with a rank's parameters; None for the mean of all ranks."""
        model = copy.deepcopy(self._model[0])
        named = dict(model.named_parameters())
        for name, rows in self.parameters_of_ranks().items():
            named[name].copy_(rows.mean(dim=0) if rank is None else rows[rank])
        return model

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Returns how far the ranks are from their mean, as `fogdist.consensus_distance`."""
        rows = self.stacked
        rows = rows.double() if rows.numel() < 1 << 22 else rows
        return float((rows - rows.mean(dim=0)).square().sum(dim=1).mean().sqrt())

    def train(self, mode: bool = True) -> StackedModel:
        self._model[0].train(mode)
        return super().train(mode)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode without gradients; afterwards each layer has its own mode again."""
        modes = [(layer, layer.training) for layer in (self, *self._model[0].modules())]
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for layer, mode in modes:
                layer.training = mode

    def check_statistics(self) -> None:
        """Raises ValueError if a layer takes statistics of its training batches, which would be those of all ranks."""
        for name, layer in self._model[0].named_modules():
            keeps = isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False)
            if layer.training and keeps:
                raise ValueError(
                    "model must have no layer with statistics of batches for virtual ranks, got "
                    f"{type(layer).__name__} {name!r} in training mode"
                )


@dataclass(frozen=True)
class Result:
    """What became of a training.

    Attributes:
        losses: The loss of each step, at the parameters that the gradient was taken at: the mean over ranks, float64.
        consensus: The consensus distance after each step, float64.
        evaluated: Steps that were made before each evaluation, and what `evaluate` returned there.
        model: The ranks' parameters at the end.
    """

    losses: Tensor
    consensus: Tensor
    evaluated: list[tuple[int, float]]
    model: StackedModel


def train(
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    data: Callable[[int], tuple[Tensor, Tensor]],
    *,
    ranks: int,
    steps: int,
    optimizer: Callable[..., Any],
    topology: Any = None,
    algorithm: Callable[..., Any] = DecentralizedSGD,
    schedule: Callable[..., Any] | None = None,
    evaluate: Callable[[StackedModel], float] | None = None,
    every: int = 1,
    seed: int = 0,
    fragments: int = 1,
    samples: Sequence[int] | None = None,
) -> Result:
    """Trains a model on many ranks in this process, with the algorithms and topologies of real ranks.

    Rank r gets, up to rounding, the parameters that it would have as a real rank with the same data.

    Args:
        model: What all ranks start from. It is copied.
        loss: Returns a rank's loss, a scalar, of the model's result for a batch and the batch's targets.
        data: Returns the inputs and the targets of a step, 0 first: of shape (ranks, batch, ...) each.
        ranks: Number of ranks.
        steps: Number of steps.
        optimizer: Makes the local optimizer of parameters, which must treat each element by itself.
        topology: The algorithm's; None for its own default.
        algorithm: A class of `fogdist.algorithms` that goes in step, `GradientAverage`, or a `functools.partial` of one.
        schedule: Makes the learning rate's scheduler of the distributed optimizer; None for a constant rate.
        evaluate: Called before the first step and after every `every` steps, in eval mode and without gradients.
        every: Steps from one evaluation to the next.
        seed: Of torch's random numbers, which dropout takes; those of the caller stay as they were.
        fragments: Of the algorithm, which gets them too.
        samples: As in `VirtualRanks`; the batches and the loss are to match.
    """
    stacked = StackedModel(model, ranks, fragments)
    options = {} if topology is None else {"topology": topology}
    if fragments > 1:
        options["fragments"] = fragments
    group = VirtualRanks(ranks, samples)
    view = algorithm(optimizer(list(stacked.stacks)), stacked, group=group, **options)
    scheduler = None if schedule is None else schedule(view)
    of_ranks = torch.func.vmap(loss, randomness="different")
    losses, distances = torch.zeros(2, steps, dtype=torch.float64)
    evaluated: list[tuple[int, float]] = []

    def look(step: int) -> None:
        if evaluate is not None and step % every == 0:
            with stacked.evaluating():
                evaluated.append((step, float(evaluate(stacked))))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        look(0)
        for made in range(steps):
            inputs, targets = data(made)
            view.zero_grad()
            each = of_ranks(stacked(inputs), targets)
            torch.autograd.backward(each.sum())
            view.step()
            if scheduler is not None:
                scheduler.step()
            losses[made] = each.detach().mean()
            if made + 1 == steps:
                view.settle()
            distances[made] = stacked.consensus_distance()
            look(made + 1)
    return Result(losses, distances, evaluated, stacked)
