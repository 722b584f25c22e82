"""Prepares the tensors and names of a call for the backend, and the backend's results for the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Tensors: TypeAlias = "Tensor | Sequence[Tensor]"

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


def own_copy(tensor: Tensor) -> Tensor:
    """Returns the values of a tensor in new memory, in order."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


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


class Average:
    """The tensors of one call of a weighted average, checked and prepared, and where their averages go.

    Args:
        tensors: One tensor, or a list or tuple of them.
        in_place: Whether results go into the tensors themselves.

    Attributes:
        sources: The tensors to send, or copies whose memory is in order.
        given: `sources` as the backend takes them: one tensor, or a list.
        output: Where the backend puts the averages: into `given`, or None for new tensors.

    Raises:
        TypeError: Not dense tensors.
        ValueError: An empty list, a dtype that has no weighted sums, or an expanded tensor to be overwritten.
    """

    __slots__ = ("_single", "_targets", "given", "output", "sources")

    def __init__(self, tensors: Tensors, in_place: bool) -> None:
        self.sources = weighted_list(tensors)
        self._single = isinstance(tensors, Tensor)
        self.given = self.sources[0] if self._single else self.sources
        self.output: Tensor | list[Tensor] | None = None
        self._targets: list[Tensor] | None = None
        if in_place:
            self.output = self.given
            self._targets = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            for place, target in enumerate(self._targets):
                writable(target, "tensor" if self._single else f"tensor[{place}]")

    def results(self, outputs: list[Tensor]) -> Tensor | list[Tensor]:
        """Returns the result for the caller, a tensor or a list, once the backend has put its results into `outputs`."""
        if self._targets is not None:
            outputs = [deliver(*pair) for pair in zip(self.sources, self._targets, strict=True)]
        return outputs[0] if self._single else outputs

    def finish(self, work: dist.Work) -> Tensor | list[Tensor]:
        """Returns the result of a completed operation for the caller."""
        return self.results(self.sources if self._targets is not None else work.get_future().value())


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


def only_result(work: dist.Work) -> Tensor:
    """Returns the one output of a completed operation."""
    result: Tensor = work.get_future().value()[0]
    return result


def deliver(buffer: Tensor, target: Tensor) -> Tensor:
    """Returns `target`, after copying in-place results into it if they could not be computed in place."""
    if buffer.data_ptr() != target.data_ptr():
        target.detach().copy_(buffer)
    return target
