"""What a rank of the parts "training" and "links" of benchmarks/compression.py does: tasks, ways to compress, and steps."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from cluster_ranks import HostRank
from fogdist import algorithms
from fogdist.compression import Codec, Int8, TopK
from fogdist.topology import Topology, by_name
from shards import Shards
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

ROOT = Path(__file__).resolve().parent.parent
# The examples are measured. Their folder comes first because benchmarks has a training.py too.
sys.path.insert(0, str(ROOT / "examples"))
MNIST = ROOT.parent / "shared" / "data" / "mnist"

FLOAT_BYTES = 4
WARMUP = 0.1  # of the steps
# Units of the perceptron, with tanh: with ReLU, runs of one seed go apart by some percent by chance.
HIDDEN = 128
CLIP = 1.0  # the largest norm of a gradient
# For the time of a codec in a dilated world.
CODEC_REPETITIONS = 9
PHASE_SECONDS = 120.0


# --- ways -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to train with fewer bytes.

    Attributes:
        algorithm: Makes the distributed optimizer of the local one and the model.
        codec: Of the exchanges; None for none.
        local_steps: From one exchange to the next.
        graph: The name of its topology.
    """

    algorithm: Callable[..., Any]
    codec: Codec | None
    local_steps: int = 1
    graph: str = "ring"


REFERENCE = "no codec"
# The order of the other recursions: adapt, then combine.
_SGD = partial(algorithms.DecentralizedSGD, order="atc")
WAYS: dict[str, Way] = {
    REFERENCE: Way(_SGD, None),
    "int8": Way(_SGD, Int8()),
    "CHOCO-SGD, top-k 33 % in 2 bits": Way(partial(algorithms.ChocoSGD, gamma=1.0), TopK(0.33, bits=2)),
    # As published, each rank sends to all others, and there is no outer momentum. More local steps cost more where ranks'
    # data differ so much, and so does forgetting a part of what was not sent.
    "SparseLoCo, 2 local steps, top-k 4.5 % in 2 bits": Way(
        partial(algorithms.SparseLoCo, error_decay=1.0), TopK(0.045, bits=2), local_steps=2, graph="full"
    ),
}


def topology(way: Way, size: int) -> Topology:
    """Returns the graph of a way; weights are symmetric."""
    return Topology.from_graph(way.graph, by_name(way.graph, size))


# --- tasks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is trained. The parent makes it, and the ranks that it forks share its memory.

    Attributes:
        model: Makes the model; random numbers are seeded before.
        optimizer: Makes the local optimizer of parameters and learning rate.
        batches: Yields the inputs and targets of a rank; of rank, number of ranks, and seed.
        loss: Of outputs and targets.
        held_out: Inputs and targets of "validation", by which learning rates are chosen, and "test".
        steps: Of a run.
        every: Steps from one evaluation to the next.
        rates: Learning rates to choose from.
        target: The loss to which steps are counted.
        about: Facts for readers.
        tuning_seeds: Of the runs by which rates are chosen. Chance should not choose.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Any, float], Optimizer]
    batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
    loss: Callable[[Tensor, Tensor], Tensor]
    held_out: dict[str, tuple[Tensor, Tensor]]
    steps: int
    every: int
    rates: tuple[float, ...]
    target: float
    about: str
    tuning_seeds: tuple[int, ...] = (101,)


def classification(
    images: Any,
    prepared: Callable[[Tensor], Tensor],
    batch: int,
    split: Literal["iid", "sorted"],
    **fields: Any,
) -> Task:
    """Returns a task of images. The last fifth of those for training is for validation.

    Args:
        images: An `ImageSet` of examples/images.py.
        prepared: Makes inputs of its images.
        batch: Images of a rank's batch.
        split: As of `Shards`.
        **fields: Of the task.
    """
    x, y = prepared(images.train_images), images.train_labels
    kept = len(x) * 4 // 5

    def batches(rank: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        shards = Shards(x[:kept], y[:kept], ranks=size, batch=batch, split=split, seed=seed)
        step = 0
        while True:
            inputs, labels = shards(step)
            yield inputs[rank], labels[rank]
            step += 1

    test = prepared(images.test_images), images.test_labels
    return Task(batches=batches, held_out={"validation": (x[kept:], y[kept:]), "test": test}, **fields)


def load_images() -> Any:
    """Returns the images of MNIST; scikit-learn's digits where there is no MNIST."""
    from images import load_digits, load_mnist

    return load_mnist(MNIST) if MNIST.is_dir() else load_digits()


def mnist_by_labels() -> Task:
    """Returns MNIST, of which each rank has two or three labels only."""
    images = load_images()
    mean, deviation = images.train_images.mean(), images.train_images.std()
    pixels = images.train_images[0].numel()
    return classification(
        images,
        lambda pictures: ((pictures - mean) / deviation).flatten(1),
        16,
        "sorted",
        model=lambda: nn.Sequential(nn.Linear(pixels, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 10)),
        optimizer=lambda parameters, rate: SGD(parameters, lr=rate, weight_decay=3e-3),
        loss=cross_entropy,
        steps=2400,
        every=120,
        rates=(0.8, 1.6, 3.2, 6.4),
        target=0.175,
        about=f"{images.name}, each rank with two or three labels; a perceptron with {HIDDEN} hidden units; SGD, batches of 16, "
        f"gradients of norm {CLIP:g} at most",
        tuning_seeds=(101, 102, 103),
    )


def resnet20() -> Task:
    """Returns ResNet-20 on made images; a rank has any of them.

    Batches are normalized by their own statistics, and so are the images on which the loss is taken.
    """
    from images import make_plaids
    from models import cifar_resnet

    return classification(
        make_plaids(),
        lambda pictures: pictures.float() / 128 - 1,
        8,
        "iid",
        model=cifar_resnet,
        optimizer=lambda parameters, rate: SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4),
        # Without smoothing the loss becomes so small that chance is most of it.
        loss=partial(cross_entropy, label_smoothing=0.1),
        steps=400,
        every=50,
        rates=(0.1, 0.2, 0.4),
        target=0.7,
        about="ResNet-20 on the plaids of examples/images.py, in place of photographs; SGD with momentum 0.9, batches of 8, "
        f"labels smoothed by 0.1, gradients of norm {CLIP:g} at most",
    )


def gpt() -> Task:
    """Returns the GPT of examples/train_gpt.py, and its text: each rank has a part of its own."""
    from models import GPT
    from train_gpt import HELD_OUT_PIECES, batches, loss_of, pieces, read_sources

    context = 32
    text, validation, test = read_sources(4 << 20)

    def pieces_of(held_out: Tensor) -> tuple[Tensor, Tensor]:
        return pieces(
            held_out, torch.linspace(0, len(held_out) - context - 1, HELD_OUT_PIECES).long(), context
        )

    return Task(
        model=lambda: GPT(256, context, 64, 4, 2),
        optimizer=lambda parameters, rate: AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1),
        batches=lambda rank, size, seed: batches(
            text.tensor_split(size)[rank], context, 8, seed=seed * size + rank
        ),
        loss=loss_of,
        held_out={"validation": pieces_of(validation), "test": pieces_of(test)},
        steps=2000,
        every=100,
        rates=(8e-3, 1.6e-2, 3.2e-2),
        target=1.6,
        about=f"the GPT of examples/train_gpt.py with {context} bytes of context, on sources of Python; AdamW, batches of 8, "
        f"gradients of norm {CLIP:g} at most",
    )


TASKS: dict[str, Callable[[], Task]] = {
    "MNIST by labels": mnist_by_labels,
    "ResNet-20": resnet20,
    "GPT": gpt,
}


def rate_factor(step: int, steps: int) -> float:
    """Returns the learning rate of a step over the highest one: linear from 0, then a cosine to 0."""
    warmup = max(1.0, WARMUP * steps)
    if step < warmup:
        return (step + 1) / warmup
    return float(0.5 * (1 + np.cos(np.pi * (step - warmup) / max(1.0, steps - warmup))))


# --- ranks ----------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A training on a rank."""

    model: nn.Module
    optimizer: Any
    schedule: torch.optim.lr_scheduler.LRScheduler
    batches: Iterator[tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    way: Way
    codec_seconds: float
    steps: int = 0


class TrainingRank(HostRank):
    """A rank that trains one of some tasks, given by name."""

    def __init__(self, rank: int, size: int, tasks: dict[str, Task]) -> None:
        super().__init__(rank, size, PHASE_SECONDS)
        self.tasks = tasks
        self.training: Training | None = None

    def make(self, task_name: str, way_name: str, seed: int, rate: float, steps: int) -> dict[str, float]:
        """Begins a training; collective.

        Args:
            task_name: A key of the tasks.
            way_name: A key of WAYS.
            seed: Of the model and of the batches, the same for all ways.
            rate: The highest learning rate.
            steps: Of the whole training, for the schedule of the rate.

        Returns:
            The bytes that the codec promises for all messages of a step, the mean, and those of `REFERENCE`; the
            seconds that a rank encodes and decodes in an exchange.
        """
        task, way = self.tasks[task_name], WAYS[way_name]
        self.training = None  # frees its buckets and handles first
        torch.manual_seed(seed)
        model = task.model()
        local = task.optimizer(model.parameters(), rate)
        graph = topology(way, self.size)
        options = {"topology": graph, "compression": way.codec, "local_steps": way.local_steps}
        optimizer = way.algorithm(local, model, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_factor, steps=steps))
        flats = [flat.detach() for flat in optimizer.buckets.flats]
        neighbors, of_reference = (
            len(each.peers(self.rank, 0)["dst_weights"])
            for each in (graph, topology(WAYS[REFERENCE], self.size))
        )
        plain = sum(FLOAT_BYTES * flat.numel() for flat in flats)
        sent = plain if way.codec is None else sum(way.codec.bytes(flat.numel()) for flat in flats)
        seconds = 0.0 if way.codec is None else codec_seconds(way.codec, flats, neighbors)
        batches = task.batches(self.rank, self.size, seed)
        self.training = Training(model, optimizer, schedule, batches, task.loss, way, seconds)
        dist.barrier()
        promised = neighbors * sent / way.local_steps
        return {"promised": promised, "plain": of_reference * plain, "codec_s": seconds}

    def run(self, steps: int, slowness: float = 1.0) -> float:
        """Makes so many steps, and returns their seconds.

        Args:
            steps: How many.
            slowness: In a dilated world: how many times as long as here gradients and the codec take. What is missing is
                slept: after the backward pass, so that it hides an exchange as compute does; the codec's time is slept
                at the end of the step, and hides nothing.
        """
        training = self.training
        assert training is not None
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            computed = time.thread_time()
            inputs, targets = next(training.batches)
            training.optimizer.zero_grad()
            loss = training.loss(training.model(inputs), targets)
            loss.backward()
            # For the same reason: gradients of two labels only can be large.
            nn.utils.clip_grad_norm_(training.model.parameters(), CLIP)
            if slowness > 1:
                time.sleep((slowness - 1) * (time.thread_time() - computed))
            training.optimizer.step()
            training.schedule.step()
            training.steps += 1
            if slowness > 1 and training.codec_seconds and training.steps % training.way.local_steps == 0:
                time.sleep((slowness - 1) * training.codec_seconds)
        return time.perf_counter() - begin

    def parameters(self) -> np.ndarray:
        """Returns all parameters, one after the other."""
        assert self.training is not None
        parameters = self.training.model.parameters()
        return nn.utils.parameters_to_vector(parameters).detach().numpy().copy()

    def leave(self) -> None:
        """Meets the others before the end."""
        self.training = None
        super().leave()


def codec_seconds(codec: Codec, flats: list[Tensor], neighbors: int) -> float:
    """Returns the seconds in which a rank encodes what it sends in an exchange, and decodes what it receives."""
    times = []
    for _ in range(CODEC_REPETITIONS):
        begin = time.thread_time()
        for flat in flats:
            message = codec.encode(flat)
            for _ in range(neighbors):
                codec.decode(message, flat.shape)
        times.append(time.thread_time() - begin)
    return statistics.median(times)
