"""Builds the commands that start ranks and agents. Its functions are pure: they start no process."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def of_host(environment: Mapping[str, str], size: int, count: int, host: int, run_id: str) -> dict[str, str]:
    """Returns the variables that the ranks of a host have in common, with those that torchrun sets but for the Store's.

    Args:
        environment: The other variables.
        size: The number of ranks of the job.
        count: The number of ranks of this host.
        host: The number of this host.
        run_id: A name of the job.
    """
    own = {
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_RANK": host,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        # With another count some versions of torch look for the other ranks under another name of the Store.
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return without_ranks(environment) | {name: str(value) for name, value in own.items()}


@dataclass(frozen=True)
class Job:
    """The checked arguments of `fog run`.

    Attributes:
        ranks: The number of ranks.
        hosts: The hosts with the ranks of each, in the order of ranks.
        command: The command of each rank.
        environment: All environment variables of the ranks.
        starts: For each host, the command of its agent.
        addresses: For each host, its address for the others.
        port: That of the Store of the first host; 0 for any free one.
        keeps_going: Whether the other ranks go on when one fails.
        max_restarts: How often each rank is started again.
        only_host: The only host whose ranks this process starts; then `port` is that of the Store of each host.
    """

    ranks: int
    hosts: Sequence[Host]
    command: Sequence[str]
    environment: Mapping[str, str]
    starts: Sequence[Sequence[str]]
    addresses: Sequence[str]
    port: int
    keeps_going: bool
    max_restarts: int
    only_host: int | None = None

    def ranks_of(self, host: int) -> range:
        """Returns the ranks of the host of a number."""
        first = sum(each.slots for each in self.hosts[:host])
        return range(first, first + self.hosts[host].slots)

    def stores(self, ports: Mapping[int, int]) -> list[str]:
        """Returns the addresses of the Stores: that of the first host, and if the others go on without it, those of all."""
        hosts = range(len(self.hosts) if self.keeps_going else 1)
        names = [f"[{name}]" if ":" in name else name for name in self.addresses]
        return [f"{names[host]}:{ports.get(host, self.port)}" for host in hosts]

    @property
    def rank(self) -> list[str]:
        """The program of a rank, with the rank's command."""
        return [*RANK, *self.command]


def agent_by_ssh(host: Host, port: int | None, path: str | None) -> list[str]:
    """Returns the command for the agent of another host, see `fog_cli.programs.agent`, over ssh.

    Everything else comes over its standard input, so no other variable and no argument shows in lists of processes.

    Args:
        host: The host.
        port: The port of ssh; None for its default.
        path: The ranks' PYTHONPATH, so that it finds the modules that this process finds.
    """
    options = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
    ssh = ["ssh", *(word for option in options for word in ("-o", option))]
    if port:
        ssh += ["-p", str(port)]
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    return [*ssh, host.name, shlex.join(["exec", *variables, *AGENT])]
