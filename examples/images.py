"""Images that the examples train on; nothing is downloaded.

Gray ones: scikit-learn's digits, and MNIST from its own files. Of three colors: CIFAR-10 from its own files,
and plaids, which are made here.
"""

from __future__ import annotations

import gzip
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Of the train/test split and of plaids; not that of training, so that all runs are tested on the same images.
SPLIT_SEED = 0
TEST_FRACTION = 0.25
CIFAR_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_TEST = "test_batch"
CIFAR_FOLDER = "cifar-10-batches-py"
PLAID_TRAIN, PLAID_TEST = 2048, 512
PLAID_NOISE = 0.25


@dataclass(frozen=True)
class ImageSet:
    """Images and their labels, as int64.

    Gray images are float32 in [0, 1] of shape (number, height, width); those of three colors are uint8 of
    shape (number, 3, height, width): as they lie in CIFAR-10's files, which are four times as large in
    float32.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def split(name: str, images: Tensor, labels: Tensor) -> ImageSet:
    """Splits images into a training and a test set, the same in every run."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order.tensor_split([int(TEST_FRACTION * len(images))])
    return ImageSet(name, images[train], labels[train], images[test], labels[test])


def load_digits() -> ImageSet:
    """Loads scikit-learn's digits."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.as_tensor(digits.images, dtype=torch.float32) / 16
    return split("digits", images, torch.as_tensor(digits.target, dtype=torch.int64))


def read_idx(path: Path) -> Tensor:
    """Reads a file in MNIST's idx format of unsigned bytes, compressed or not."""
    raw = path.read_bytes()
    data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    # Two zero bytes, the type (8: unsigned byte), the number of dimensions, then each as a big-endian int32.
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    dimensions = data[3]
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    values = torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8)
    if values.numel() != math.prod(shape):
        raise ValueError(f"{path} says {shape} but holds {values.numel()} bytes")
    return values.reshape(shape)


def find_idx(folder: Path, stem: str, dimensions: int) -> Path | None:
    """Finds e.g. train-images-idx3-ubyte.gz; some copies have a dot for the dash, or are unpacked."""
    names = [f"{stem}{sep}idx{dimensions}-ubyte{end}" for sep in "-." for end in (".gz", "")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def load_mnist(folder: Path) -> ImageSet:
    """Loads MNIST; where only the t10k files are there, splits them into a training and a test set."""
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    for stem in ("train", "t10k"):
        images, labels = find_idx(folder, f"{stem}-images", 3), find_idx(folder, f"{stem}-labels", 1)
        if images and labels:
            parts[stem] = read_idx(images).float() / 255, read_idx(labels).long()
    if "t10k" not in parts:
        raise FileNotFoundError(f"{folder} holds no t10k-images-idx3-ubyte.gz with t10k-labels-idx1-ubyte.gz")
    if "train" not in parts:
        return split("MNIST (no train files here: the t10k files, split in two)", *parts["t10k"])
    return ImageSet("MNIST", *parts["train"], *parts["t10k"])


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays and plain values only: a pickle may call whatever it names."""

    def find_class(self, module: str, name: str) -> Any:
        recipe: Any = np.empty(0).__reduce__()
        known = {
            ("numpy.core.multiarray", "_reconstruct"): recipe[0],
            ("numpy._core.multiarray", "_reconstruct"): recipe[0],
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array")
        return known[module, name]


def read_cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one of CIFAR-10's python batches: a pickled dict with rows of 3,072 bytes, and their labels.

    Returns:
        Images, uint8 of shape (number, 3, 32, 32), and labels.
    """
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        rows, labels = np.asarray(batch[b"data"]), np.asarray(batch[b"labels"])
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, UnicodeError) as error:
        raise ValueError(f"{path} is not a python batch of CIFAR-10: {error}") from error
    if rows.dtype != np.uint8 or rows.shape != (len(labels), 3 * 32 * 32):
        raise ValueError(
            f"{path} must hold a row of 3072 bytes for each of its {len(labels)} labels, "
            f"got {rows.dtype} of shape {rows.shape}"
        )
    return torch.from_numpy(rows.reshape(-1, 3, 32, 32).copy()), torch.as_tensor(labels, dtype=torch.int64)


def load_cifar10(folder: Path) -> ImageSet:
    """Loads CIFAR-10 from its python batches, in the folder or in cifar-10-batches-py below it."""
    inner = folder / CIFAR_FOLDER
    folder = inner if inner.is_dir() else folder
    missing = [name for name in (*CIFAR_TRAIN, CIFAR_TEST) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} holds no {', '.join(missing)}: CIFAR-10's python version, unpacked, is needed there"
        )
    parts = [read_cifar_batch(folder / name) for name in CIFAR_TRAIN]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ImageSet("CIFAR-10", images, labels, *read_cifar_batch(folder / CIFAR_TEST))


def make_plaids() -> ImageSet:
    """Makes images of 3 x 32 x 32 in 10 classes, in place of CIFAR-10: the same ones wherever they are made.

    A plaid is the sum of two gratings, whose directions are mirror images of each other: a flipped image
    belongs to the same class. A class is one of five directions with one of two wavelengths. Where the
    gratings begin, their colors and their contrast are random in each image, and noise is added, so that no
    pixel tells the class.
    """
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    count = PLAID_TRAIN + PLAID_TEST
    labels = torch.randint(10, (count,), generator=generator)
    angle = math.pi * (labels % 5 + 0.5) / 10  # between the axes
    frequency = 2 * math.pi / torch.tensor([4.0, 7.0])[labels // 5]  # radians a pixel
    along, across = ((frequency * part).reshape(-1, 1, 1) for part in (angle.cos(), angle.sin()))
    x, y = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="xy")
    images = torch.full((count, 3, 32, 32), 0.5)
    for side in (1, -1):
        phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
        grating = torch.cos(along * x + side * across * y + phase).unsqueeze(1)
        color = torch.randn(count, 3, 1, 1, generator=generator)
        contrast = 0.1 + 0.1 * torch.rand(count, 1, 1, 1, generator=generator)
        images += contrast * grating * color / color.norm(dim=1, keepdim=True)
    images += PLAID_NOISE * torch.randn(images.shape, generator=generator)
    pixels = (255 * images).round().clamp(0, 255).to(torch.uint8)
    return ImageSet(
        "plaids", pixels[:PLAID_TRAIN], labels[:PLAID_TRAIN], pixels[PLAID_TRAIN:], labels[PLAID_TRAIN:]
    )
