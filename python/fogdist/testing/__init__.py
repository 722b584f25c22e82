"""What tests of a training job need: `fogdist.testing.faults` injects failures. Nothing else of fogdist imports this."""

from __future__ import annotations

from fogdist.testing import faults

__all__ = ["faults"]
