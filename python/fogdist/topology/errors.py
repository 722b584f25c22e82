"""The exception of a topology argument whose type is right and whose value is not allowed."""

from __future__ import annotations


class TopologyError(ValueError, AssertionError):
    """A size, rank, shape, base or graph that no topology can be built from.

    It is a ValueError, as every bad argument value in fogdist. It is an AssertionError too because BlueFog
    checked these same arguments with ``assert``: scripts and tests written for it catch AssertionError, and
    keep working. Arguments of a wrong type raise TypeError instead.
    """
