"""Changes of parameters while their values are on the way to other ranks, which an average then overwrites."""

from __future__ import annotations

import warnings

from torch import nn

from fogdist.flat_buckets import FlatBuckets


class ChangeWatch:
    """Warns once if parameters changed between `begin` and `end`."""

    def __init__(self) -> None:
        self._versions: list[int] | None = None
        self._has_warned = False

    def begin(self, buckets: FlatBuckets) -> None:
        """Call it when the values of the buckets' tensors are sent."""
        self._versions = [tensor._version for tensor in buckets.tensors]

    def end(self, buckets: FlatBuckets, stacklevel: int = 1) -> None:
        """Call it before an average replaces them; takes replaced memory back (`FlatBuckets.rehome`).

        Without `begin` before it, it does nothing.

        Args:
            buckets: As in `begin`.
            stacklevel: Of the caller's line that the warning is to show, 1 for that which calls this.
        """
        versions, self._versions = self._versions, None
        if versions is None:
            return
        was_replaced = buckets.rehome()
        changed = [
            tensor
            for tensor, version in zip(buckets.tensors, versions, strict=True)
            if tensor._version != version
        ]
        if (changed or was_replaced) and not self._has_warned:
            self._has_warned = True
            which = buckets.label_of(changed[0]) if changed else "a parameter"
            warnings.warn(
                f"{which} was changed between the forward pass and step(); the average of the values that it "
                "had before replaces them. Change parameters after step().",
                stacklevel=stacklevel + 1,
            )

    def forget(self) -> None:
        """Changes since `begin` were right."""
        self._versions = None


def forward_changes_parameters(model: nn.Module) -> bool:
    """Whether a forward pass changes parameters: embeddings with a largest norm rescale what they look up."""
    return any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        for module in model.modules()
    )
