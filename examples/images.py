"""Images that the examples train on: scikit-learn's digits, and MNIST from its own files. Nothing is downloaded."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SPLIT_SEED = (
    0  # of the train/test split; apart from that of training, so that runs are tested on the same images
)
TEST_FRACTION = 0.25


@dataclass(frozen=True)
class ImageSet:
    """Images as float32 in [0, 1] of shape (number, height, width), labels as int64."""

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
