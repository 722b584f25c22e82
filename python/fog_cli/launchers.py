"""Builds the commands that start ranks and agents. Its functions are pure: they start no process."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fog_cli.hosts import Host

# The program that runs a rank's command and prefixes each line of its output with the rank.
RANK = [sys.executable, "-m", "fog_cli.programs.rank"]
AGENT = [sys.executable, "-m", "fog_cli.programs.agent"]

# The beginnings of the variables by which launchers tell a process its rank.
_OF_RANKS = (
    *("PMI", "OMPI_", "MPI_LOCAL", "HYDI_", "TORCHELASTIC_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GTIDS"),
)


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the variables that would make a process a rank of another launcher."""
    return {name: value for name, value in environment.items() if not name.startswith(_OF_RANKS)}


@dataclass(frozen=True)
class Job:
    """The checked arguments of `fog run`.

    Attributes:
        ranks: The number of ranks.
        hosts: The hosts with the ranks of each, in the order of ranks.
        command: The command of each rank.
        environment: All environment variables of the ranks.
        ssh_port: The port of ssh; None for its default.
        log_folder: The folder of files with the output of each rank; None for no files.
    """

    ranks: int
    hosts: Sequence[Host]
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh_port: int | None = None
    log_folder: str | None = None

    @property
    def rank(self) -> list[str]:
        """The program of a rank, with the rank's command."""
        return [*RANK, *(["--log-dir", self.log_folder] if self.log_folder else []), *self.command]


def agent_by_ssh(job: Job, host: Host) -> list[str]:
    """Returns the command for the agent of another host, see `fog_cli.programs.agent`, over ssh.

    It finds the modules that this process finds. Everything else comes over its standard input, so no other variable and
    no argument shows in lists of processes.
    """
    options = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=30", "ServerAliveCountMax=10")
    ssh = ["ssh", *(word for option in options for word in ("-o", option))]
    if job.ssh_port:
        ssh += ["-p", str(job.ssh_port)]
    path = job.environment.get("PYTHONPATH")
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    return [*ssh, host.name, shlex.join(["exec", *variables, *AGENT])]


def agent_by_srun(host: Host) -> list[str]:
    """Returns the command for the agent of a host of the allocation: a step of its own, so that no other ends with it.

    The allocation needs --no-kill to survive the loss of a node. The step must not have it: it is to end with its node,
    so that its end is seen.
    """
    words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--overlap", "--cpu-bind=none"]
    return [*words, "--no-kill=off", "--kill-on-bad-exit=0", "--unbuffered", "--export=ALL", *AGENT]
