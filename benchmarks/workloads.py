"""Real models by the sizes of their layers, the clusters that train them, and *dilation*: the same, small and slow.

A step of a real cluster is given by the bytes of each parameter, the seconds that the accelerator computes, and the bits
per second of a host's link. An emulated one has

    elements of a tensor    n' = round(n / size), at least 1
    caps of buckets         c' = c / size
    seconds of compute      t' = t * time
    bits per second         r' = r / (size * time)

so that what a bucket of b bytes takes on the link, over the seconds of compute, stays what it is:

    (8 b' / r') / t'  =  (8 (b / size) / (r / (size time))) / (t time)  =  (8 b / r) / t

up to the rounding of n'. `size` makes tensors small enough for memory and cores, `time` makes the step so long that the
cores are idle for most of it. Neither changes the numbers of tensors, buckets, messages and peers.

What a message costs beside its bytes, the latency and the processor's work, is not dilated: with `time` = 4 a latency of
100 us stands for one of 25 us.

The seconds of a step are split into a third for the forward and two thirds for the backward pass, and among the layers by
their floating-point operations, as on an accelerator, whose layers with many parameters need not be those that
compute long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Of a step.
FORWARD_SHARE = 1 / 3
FLOAT_BYTES = 4
# Of torch's DDP, and of fogdist's optimizers.
DDP_CAP_MB, FOG_CAP_MB = 25.0, 4.0


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients come together.

    Attributes:
        sizes: The elements of each parameter.
        operations: Multiplications and additions of a forward pass for one sample (image or token), up to a factor
            that is the same for all layers.
    """

    sizes: tuple[int, ...]
    operations: float


@dataclass(frozen=True)
class Model:
    """A model's layers, in the order of its forward pass."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def sizes(self) -> list[int]:
        """The elements of each parameter."""
        return [size for layer in self.layers for size in layer.sizes]

    @property
    def shares(self) -> list[float]:
        """Each layer's part of a pass."""
        total = sum(layer.operations for layer in self.layers)
        return [layer.operations / total for layer in self.layers]


def resnet50() -> Model:
    """ResNet-50 v1.5 for ImageNet: 161 parameters, 25.6 million elements; each convolution with its normalization."""
    layers: list[Layer] = []

    def convolution(inputs: int, outputs: int, kernel: int, pixels: int) -> None:
        weight = inputs * outputs * kernel**2
        layers.append(Layer((weight, outputs, outputs), weight * pixels**2))

    convolution(3, 64, 7, 112)
    inputs, pixels = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            before = pixels
            if stage and not block:
                pixels //= 2
            convolution(inputs, width, 1, before)
            convolution(width, width, 3, pixels)
            convolution(width, 4 * width, 1, pixels)
            if not block:
                convolution(inputs, 4 * width, 1, pixels)  # beside the block
            inputs = 4 * width
    layers.append(Layer((2048 * 1000, 1000), 2048 * 1000))
    return Model("resnet50", tuple(layers))


def gpt2() -> Model:
    """GPT-2 124M, on pieces of 1,024 tokens: 148 parameters, 124.4 million elements.

    The head's weight is the embedding's, so its gradient is complete at the end of the backward pass only.
    """
    width, tokens, words, blocks = 768, 1024, 50257, 12
    norm = (width, width)

    def linear(inputs: int, outputs: int) -> tuple[int, int]:
        return inputs * outputs, outputs

    attention = (*norm, *linear(width, 3 * width), *linear(width, width))
    perceptron = (*norm, *linear(width, 4 * width), *linear(4 * width, width))
    block = [
        Layer(attention, 4 * width**2 + width * tokens),  # the scores and their sums, of half the tokens each
        Layer(perceptron, 8 * width**2),
    ]
    embeddings = Layer((words * width, tokens * width), 0.0)
    return Model("gpt2", (embeddings, *block * blocks, Layer(norm, words * width)))


MODELS = {"resnet50": resnet50(), "gpt2": gpt2()}


@dataclass(frozen=True)
class Scenario:
    """A cluster that exists, and what it trains. One emulated rank is one host with all its GPUs.

    The 8 GPUs of a host share its link: what leaves is what the host's GPUs have averaged among themselves over NVLink,
    once. So a ring all-reduce over all GPUs loads each link (2 S (n - 1) / n bytes for n hosts), and so does
    BlueFog's inner-outer exponential graph, where one GPU of a host talks to another host in each step (S bytes). NVLink's
    own time (some 1.5 ms for ResNet-50 on V100) is not emulated.

    Attributes:
        name: A letter, or what is the matter with the cluster.
        model: A key of MODELS.
        compute: Seconds of a step of one GPU.
        rate: Bits per second of a host's link, each way.
        between: Bits per second of the link that joins two data centers; None for one center.
        local_steps: Of the ways that have local steps.
        compute_is_of: Where `compute` comes from.
    """

    name: str
    model: str
    compute: float
    rate: float
    between: float | None = None
    local_steps: int = 8
    compute_is_of: str = ""


# Batch 64 a GPU: NVIDIA's DeepLearningExamples, ResNet50 v1.5, DGX-1 with V100 32GB, one GPU, FP32: 356 images/s.
V100_IMAGES, V100_BATCH = 356.0, 64
# llm.c's 10 billion tokens in 45 minutes on 8 H100, batches of 64 x 1,024 tokens a GPU (KellerJordan/modded-nanogpt).
H100_TOKENS, H100_BATCH = 10e9 / (45 * 60) / 8, 64 * 1024
_V100 = "64 images a GPU at 356 images/s: NVIDIA DeepLearningExamples, ResNet50 v1.5, V100 32GB, FP32"
_H100 = "65,536 tokens a GPU at 463,000 tokens/s: llm.c, 10 billion tokens in 45 minutes on 8 H100"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("a", "resnet50", V100_BATCH / V100_IMAGES, 25e9, compute_is_of=_V100),
        Scenario("b", "gpt2", H100_BATCH / H100_TOKENS, 100e9, compute_is_of=_H100),
        Scenario(
            "c", "gpt2", H100_BATCH / H100_TOKENS, 100e9, between=1e9, local_steps=500, compute_is_of=_H100
        ),
    )
}


@dataclass(frozen=True)
class Dilation:
    """How much smaller and slower an emulated cluster is; see the module.

    Attributes:
        size: Real bytes over emulated ones.
        time: Emulated seconds over real ones.
    """

    size: float
    time: float

    def elements(self, real: int) -> int:
        """Of a tensor."""
        return max(1, round(real / self.size))

    def rate(self, real: float) -> float:
        """Of a link."""
        return real / (self.size * self.time)

    def cap_mb(self, real: float) -> float:
        """Of a bucket."""
        return real / self.size


def sizes_of(model: Model, dilation: Dilation) -> list[int]:
    """The emulated elements of each parameter."""
    return [dilation.elements(size) for size in model.sizes]


def ddp_buckets(sizes: Sequence[int], cap_mb: float) -> list[list[int]]:
    """The parameters of each of DDP's buckets, in the order in which they leave: as torch makes them.

    Args:
        sizes: Elements of each parameter, in the order of the forward pass.
        cap_mb: MiB of a bucket.
    """
    import torch
    import torch.distributed as dist

    last_first = list(reversed(range(len(sizes))))
    tensors: list[Tensor] = [torch.empty(sizes[place], device="meta") for place in last_first]
    # Of one parameter torch looks at the device only.
    assigned = dist._compute_bucket_assignment_by_size(tensors, [max(1, int(cap_mb * 2**20))])[0]
    return [[last_first[place] for place in bucket] for bucket in assigned]


def bucket_bytes(sizes: Sequence[int], buckets: Sequence[Sequence[int]]) -> list[int]:
    """The bytes of each bucket."""
    return [FLOAT_BYTES * sum(sizes[place] for place in bucket) for bucket in buckets]


def emulated(scenario: Scenario, seconds: float, megabytes: float = 3.5) -> Dilation:
    """The dilation that makes a step of a scenario compute so long.

    Args:
        scenario: Which; a strong scaling gives it less compute.
        seconds: Of an emulated step's compute.
        megabytes: Of the emulated parameters, about; the sizes are divided by a power of two.
    """
    real = FLOAT_BYTES * sum(MODELS[scenario.model].sizes)
    return Dilation(2.0 ** round(math.log2(real / (1e6 * megabytes))), seconds / scenario.compute)
