"""Faults, to try out how a job takes them: of processes, of groups and the Store, of disks, and of links.

Functions inject one fault into a process (by its pid, or into the calling one) or into a network device. A `Schedule`
injects several, at steps of the training or at times, chosen by hand or at random from a seed. Nothing here needs
fog: jobs on any backend of torch.distributed can be tested.
"""

from __future__ import annotations

from fogdist.testing.faults.commands import Unavailable
from fogdist.testing.faults.disk import file_limit, full_disk
from fogdist.testing.faults.groups import abort, lose_store
from fogdist.testing.faults.links import cut_link, lossy_link, mend_link, slow_link
from fogdist.testing.faults.processes import deadlock_with_gil, kill, segfault, stop
from fogdist.testing.faults.schedule import Fault, Schedule

__all__ = [
    "Fault",
    "Schedule",
    "Unavailable",
    "abort",
    "cut_link",
    "deadlock_with_gil",
    "file_limit",
    "full_disk",
    "kill",
    "lose_store",
    "lossy_link",
    "mend_link",
    "segfault",
    "slow_link",
    "stop",
]
