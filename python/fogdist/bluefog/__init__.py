"""The package for scripts of BlueFog and asyncddp: ``import bluefog.torch as bf`` finds this package.

    torchrun --nproc_per_node=4 -m fogdist.bluefog script.py --its --arguments

runs a script behind it. In a notebook, or in a worker that some other program starts, import it first::

    import fogdist.bluefog
    import bluefog.torch as bf

From then on, in this process only, `bluefog` and its modules are those here; no package of that name is installed.
They take the call forms of all BlueFog versions and call fogdist's public functions. docs/bluefog.md says what differs.

A BlueFog that was imported before is an ImportError, as half of a script would use the one and half the other. One that
is only installed is left alone, with a warning.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import PathFinder

from fogdist.bluefog import common, run, torch
from fogdist.bluefog.common import topology_util
from fogdist.bluefog.torch import ddp, optim

__all__ = ["common", "run", "torch"]

__version__ = "0.3.0"  # of BlueFog, whose interface this is

_MODULES = {
    "bluefog": sys.modules[__name__],
    "bluefog.common": common,
    "bluefog.common.basics": common,
    "bluefog.common.topology_util": topology_util,
    "bluefog.common.util": common,
    "bluefog.run": run,
    "bluefog.run.interactive_run": run,
    "bluefog.run.run": run,
    "bluefog.torch": torch,
    "bluefog.torch.ddp": ddp,
    "bluefog.torch.optim": optim,
    # BlueFog spreads the names of `bluefog.torch` over these, as others above.
    "bluefog.torch.mpi_ops": torch,
    "bluefog.torch.optimizers": torch,
    "bluefog.torch.topology_util": torch,
    "bluefog.torch.utility": torch,
}


def _open() -> None:
    for name, module in _MODULES.items():
        other = sys.modules.get(name, module)
        if other is not module:
            place = getattr(other, "__file__", None) or "this program"
            raise ImportError(f"fogdist.bluefog must be imported before bluefog, got {name} of {place}")
    if "bluefog" not in sys.modules and (installed := PathFinder.find_spec("bluefog")) is not None:
        places = installed.origin or list(installed.submodule_search_locations or [])
        warnings.warn(
            f"bluefog is fogdist.bluefog in this process; the one of {places} is left alone", stacklevel=3
        )
    for name, module in _MODULES.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_MODULES[parent], child, module)  # for `from bluefog.torch import mpi_ops`


_open()
