"""Warns of changes to parameters during an exchange of their values, because the average overwrites the changes."""

from __future__ import annotations

from torch import nn

from fogdist.training.buckets import FlatBuckets
from fogdist.warn import warn_user


class ChangeWatch:
    """Warns once if parameters changed between `begin` and `end`."""

    def __init__(self) -> None:
        self._versions: list[tuple[int, int]] | None = None
        self._has_warned = False

    def begin(self, buckets: FlatBuckets) -> None:
        """Call it when the values of the buckets' tensors are sent."""
        self._versions = buckets.versions()

    def end(self, buckets: FlatBuckets) -> None:
        """Call it before an average replaces the values. Without `begin` before it, it does nothing.

        Args:
            buckets: As in `begin`.
        """
        versions, self._versions = self._versions, None
        if versions is None or versions == (now := buckets.versions()) or self._has_warned:
            return
        self._has_warned = True
        tensors = [each for number in range(len(buckets.flats)) for each in buckets.tensors_of(number)]
        changed = next(t for t, old, new in zip(tensors, versions, now, strict=True) if old != new)
        warn_user(
            f"{buckets.label_of(changed)} was changed between the forward pass and step(); the average of the values "
            "that it had before replaces them. Change parameters after step()."
        )

    def forget(self) -> None:
        """Accepts the changes since `begin`."""
        self._versions = None


def forward_changes_parameters(model: nn.Module) -> bool:
    """Returns whether a forward pass changes parameters, as embeddings with `max_norm` rescale rows."""
    return any(
        isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
        for module in model.modules()
    )
