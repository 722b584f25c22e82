"""The models that examples and benchmarks train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(pixels: int, hidden: tuple[int, ...], classes: int = 10) -> nn.Sequential:
    """Returns a classifier of flattened images with ReLU between its layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip((pixels, *hidden), hidden, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1] if hidden else pixels, classes))


def convolutional(pixels: int, classes: int = 10) -> nn.Sequential:
    """Returns a small convolutional classifier of gray images of `pixels` x `pixels`."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (pixels // 4) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions around which the input is added; 4 * `width` channels leave."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def cifar_resnet(depth: int = 20, classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Returns a ResNet for small images: 16, 32 and 64 channels (He et al., CVPR 2016, section 4.2).

    Args:
        depth: 6 k + 2 layers; 20 has 0.27 million parameters.
        classes: Number of classes.
        channels: The number of channels of the images.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6 k + 2, as 8, 14 or 20, got {depth}")
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    ]
    inputs = 16
    for width in (16, 32, 64):
        for place in range((depth - 2) // 6):
            layers.append(BasicBlock(inputs, width, stride=2 if place == 0 and width > 16 else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """Returns ResNet-50 for images of 224 x 224 pixels: 25.6 million parameters (He et al., CVPR 2016)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for place in range(count):
            layers.append(Bottleneck(inputs, width, stride=2 if place == 0 and width > 64 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class GPT(nn.Module):
    """A small GPT: pre-norm transformer blocks with causal attention, head tied to the embedding.

    Args:
        symbols: Size of the vocabulary.
        context: Symbols that it sees at most.
        width: The width of the embedding; a multiple of `heads`.
        heads: The number of attention heads.
        layers: Blocks.
    """

    def __init__(self, symbols: int, context: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.symbols.weight
        for parameter in (self.symbols.weight, self.places.weight):
            nn.init.normal_(parameter, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.mask: Tensor
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, length, symbols) of what follows each of the symbols x (batch, length)."""
        length = x.shape[1]
        y: Tensor = self.symbols(x) + self.places(torch.arange(length, device=x.device))
        for block in self.blocks:
            y = block(y, src_mask=self.mask[:length, :length], is_causal=True)
        logits: Tensor = self.head(self.norm(y))
        return logits


class Llama(nn.Module):
    """A small Llama: RMSNorm, rotary embedding, grouped-query attention and SwiGLU (Touvron et al., arXiv 2307.09288).

    Args:
        symbols: Size of the vocabulary.
        context: Symbols that it sees at most.
        width: The width of the embedding; an even multiple of `heads`.
        heads: The number of heads of the queries; a multiple of `groups`.
        groups: The number of heads of the keys and values.
        layers: Blocks.
    """

    def __init__(self, symbols: int, context: int, width: int, heads: int, groups: int, layers: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)
        nn.init.normal_(self.symbols.weight, std=0.02)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(pairs) / pairs))
        self.turns: Tensor
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, length, symbols) of what follows each of the symbols x (batch, length)."""
        y: Tensor = self.symbols(x)
        for block in self.blocks:
            y = block(y, self.turns[:, : x.shape[1]])
        logits: Tensor = self.head(self.norm(y))
        return logits


class LlamaBlock(nn.Module):
    """Attention, then SwiGLU, each of a norm of its input, which is added to it."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads  # of a head
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, groups * self.size, bias=False)
        self.values = nn.Linear(width, groups * self.size, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.attention_norm(x)
        # Of shape (batch, heads, length, size of a head).
        queries, keys, values = (
            layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        found = functional.scaled_dot_product_attention(
            turned(queries, turns), turned(keys, turns), values, is_causal=True, enable_gqa=True
        )
        x = x + self.output(found.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Returns heads whose pairs of elements are turned by an angle that grows with the place (rotary embedding)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turns
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
