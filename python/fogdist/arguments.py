"""Prepares the tensors and names of a call for the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Tensor | Sequence[Tensor]

WEIGHTED_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def dense(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Returns the tensor, detached if anything is differentiated through it.

    Raises:
        TypeError: Not a dense torch.Tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{argument} must be dense (layout torch.strided), got layout {tensor.layout}")
    return tensor.detach() if tensor.requires_grad else tensor


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if its memory holds its values in order, otherwise a copy with this property."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():  # the most frequent case
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def writable(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Returns the tensor itself.

    Raises:
        ValueError: Some of its elements are one (`expand`, `unfold`), so results have no place of their own; or
            its strides are such that they might be.
    """
    if tensor.is_contiguous():
        return tensor
    reach = 0  # the extent of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{argument} must have memory for each element to be written in place, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} (an expanded one?)"
            )
        reach += stride * max(size - 1, 0)
    return tensor


def weighted(tensor: Tensor, argument: str = "tensor") -> Tensor:
    """Returns the tensor as a weighted sum reads it: detached, its memory in order.

    Raises:
        TypeError: Not a dense torch.Tensor.
        ValueError: A dtype that has no weighted sums.
    """
    source = plain(dense(tensor, argument))
    if source.dtype not in WEIGHTED_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHTED_DTYPES)
        raise ValueError(f"{argument} must have one of the dtypes {allowed}, got {source.dtype}")
    return source


def weighted_list(tensors: Tensors) -> list[Tensor]:
    """Returns a tensor, or each of a list or tuple, as `weighted` does; raises as that.

    Raises:
        ValueError: The list is empty.
    """
    if isinstance(tensors, Tensor):
        return [weighted(tensors)]
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensor must be a torch.Tensor or a list of them, got {type(tensors).__name__}")
    if not tensors:
        raise ValueError("tensor must be a torch.Tensor or a list of at least one, got an empty list")
    return [weighted(tensor, f"tensor[{place}]") for place, tensor in enumerate(tensors)]


def outputs_of(out: Tensors, sources: Tensors) -> Tensors:
    """Returns the argument `out` of an operation as the backend takes it, which checks shapes and dtypes.

    Args:
        out: The argument.
        sources: The tensors that the operation sends, one or a list.

    Raises:
        TypeError: Not dense tensors, or not as many as there are sources.
        ValueError: One is not contiguous.
    """
    if isinstance(sources, Tensor) != isinstance(out, Tensor):
        raise TypeError(
            f"out must be a torch.Tensor or a list of them, as tensor is, got {type(out).__name__}"
        )
    if isinstance(out, Tensor):
        return _in_order(out, "out")
    if len(out) != len(sources):
        raise TypeError(f"out must have as many tensors as tensor, {len(sources)}, got {len(out)}")
    return [_in_order(each, f"out[{place}]") for place, each in enumerate(out)]


def _in_order(out: Tensor, argument: str) -> Tensor:
    output = dense(out, argument)
    if plain(output) is not output:
        raise ValueError(
            f"{argument} must be contiguous, got strides {output.stride()} of shape {tuple(output.shape)}"
        )
    return output


def has_dimensions(tensor: Tensor) -> Tensor:
    """Returns the tensor itself.

    Raises:
        ValueError: It has no dimension to be concatenated on.
    """
    if tensor.dim() == 0:
        raise ValueError("tensor must have at least one dimension to be concatenated on, got a 0-d tensor")
    return tensor


def key(name: str | None) -> str:
    """Returns the name of an operation as the backend takes it: "" for none.

    Raises:
        TypeError: Not a string.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    return name or ""
