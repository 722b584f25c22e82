"""`bluefog.run`. Its launchers `bfrun` and `ibfrun` are torchrun, mpiexec or srun here."""

from __future__ import annotations

from fogdist.bluefog.run import interactive_run

__all__ = ["interactive_run"]
