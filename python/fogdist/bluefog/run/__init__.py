"""`bluefog.run`. Of its launchers, `bfrun` is torchrun, mpiexec or srun here, and `ibfrun` is `fogdist.interactive`."""

from __future__ import annotations

from fogdist.bluefog.run import interactive_run

__all__ = ["interactive_run"]
