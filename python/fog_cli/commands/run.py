"""`fog run`: starts ranks on one host or several."""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fog_cli import UsageError, keep_going, launchers, number, one_host
from fog_cli.hosts import Host, is_local, parse_hosts, place, read_hostfile
from fog_cli.launchers import Job

EXAMPLES = """\
examples:
  fog run -np 4 train.py --epochs 3           4 ranks on this host
  fog run -np 4 python train.py --epochs 3    the same
  fog run -np 4 -m package.train              a module
  fog run -np 4 numactl -m 0 python train.py  any program
  fog run -np 8 -H a:4,b:4 train.py           4 ranks on each of two hosts, which ssh reaches without a password
  fog run -np 8 --hostfile hosts train.py     lines "host slots=4" or "host:4"
  fog run -np 8 --keep-going train.py         the other ranks go on when one dies
  fog run -np 8 --keep-going -H a:4,b:4 --only-host 1 train.py    on b, as its part of a job that a scheduler starts

Options come before the script; what follows it is the script's. Each line of output begins with its rank:
"[2] loss 0.31". The exit status is that of the rank that failed first; 2 if the command line is wrong, and then nothing
has been started.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Describes the arguments."""
    parser.usage = "fog run -np N [options] [-m] script.py [arguments of the script]"
    add_placing(parser, 1)
    parser.add_argument(
        "--keep-going", action="store_true", help="when a rank dies, let the others go on; one agent per host"
    )
    parser.add_argument(
        "--max-restarts",
        type=number(int, 0),
        metavar="N",
        help="with --keep-going: start a rank that died again, up to N times each (default: 0)",
    )
    parser.add_argument(
        "--only-host",
        type=number(int, 0),
        metavar="N",
        help="with --keep-going: start only the ranks of host N of -H, counted from 0; each host runs this with its number",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module, as with python -m"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="the script or program, and its arguments",
    )


def add_placing(parser: argparse.ArgumentParser, least: int) -> None:
    """Describes the options that say where ranks are and how they start, for this command and `fog advise`.

    Args:
        parser: Of the command.
        least: The least number of ranks.
    """
    # The other options of `fog run`, for the commands that do not have them.
    parser.set_defaults(keep_going=False, max_restarts=None, only_host=None)
    parser.add_argument(
        "-np", "--num-proc", type=number(int, least), metavar="N", help="how many ranks to start"
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts and how many ranks each takes, 1 if it does not say",
    )
    hosts.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="file of hosts, a line each: host slots=N, or host:N"
    )
    parser.add_argument(
        "-p", "--ssh-port", type=number(int, 1, 65535), metavar="PORT", help="port of ssh on the other hosts"
    )
    parser.add_argument(
        "--network-interface",
        metavar="NIC",
        help="network interface for all traffic between hosts (FOG_INTERFACE, and Gloo's, NCCL's and UCX's)",
    )
    parser.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of all ranks; may be repeated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks and waits for their end."""
    job = prepare(arguments, os.environ)
    is_here = not job.keeps_going and all(is_local(host.name) for host in job.hosts)
    try:
        return one_host.run(job) if is_here else keep_going.run(job)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error


def prepare(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Job:
    """Checks the command line and builds the commands of the agents.

    Args:
        arguments: The parsed arguments.
        environment: The variables of this process.

    Raises:
        UsageError: The arguments are invalid.
    """
    ranks = arguments.num_proc
    if ranks is None:  # argparse would also say so if an unknown option before it is what is wrong
        raise UsageError("-np: it is missing; allowed are numbers from 1 on")
    for option in ("max_restarts", "only_host"):
        if getattr(arguments, option) is not None and not arguments.keep_going:
            raise UsageError(
                f"--{option.replace('_', '-')}: it is an option of --keep-going, which is missing"
            )
    hosts = [Host("localhost", ranks)]
    if arguments.hosts:
        hosts = place(parse_hosts("-H", arguments.hosts.split(",")), ranks)
    elif arguments.hostfile:
        hosts = place(read_hostfile(arguments.hostfile), ranks)
    variables = _variables(arguments, environment)
    only = arguments.only_host
    if only is not None and not only < len(hosts) > 1:
        raise UsageError(f"--only-host: got {only}; -H or --hostfile must name such a host, and others")
    starts = [
        launchers.AGENT
        if only is not None or is_local(host.name)
        else launchers.agent_by_ssh(host, arguments.ssh_port, variables.get("PYTHONPATH"))
        for host in hosts
    ]
    if any(start[0] == "ssh" for start in starts) and shutil.which("ssh") is None:
        raise UsageError("there is no ssh on PATH, which starts the agents of other hosts")
    addresses, port = ["127.0.0.1"], 0
    if len(hosts) > 1:
        addresses = [host.name for host in hosts]
        addresses[0] = variables.get("MASTER_ADDR") or addresses[0]
        if only is None:  # "localhost" is another host there
            addresses = [socket.gethostname() if is_local(address) else address for address in addresses]
        try:
            port = int(number(int, int(only is not None), 65535)(variables.get("MASTER_PORT") or "0"))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"MASTER_PORT: {error}") from None
    return Job(
        ranks=ranks,
        hosts=hosts,
        command=rank_command(arguments.command, arguments.module, variables),
        environment=variables,
        starts=starts,
        addresses=addresses,
        port=port,
        keeps_going=arguments.keep_going,
        max_restarts=arguments.max_restarts or 0,
        only_host=only,
    )


def rank_command(words: Sequence[str], is_module: bool, environment: Mapping[str, str]) -> list[str]:
    """Returns the command of a rank.

    Args:
        words: A script, a module or a program, and its arguments.
        is_module: Whether the first word is the name of a module.
        environment: The ranks' environment, whose PATH is searched.

    Raises:
        UsageError: There is no such script or program.
    """
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        raise UsageError(
            "what shall the ranks run? Name a script, -m and a module, or a program, after the options"
        )
    first = words[0]
    if is_module:
        return [sys.executable, "-m", *words]
    if first.startswith("-"):
        raise UsageError(f"{first}: no option of fog run; `fog run --help` lists them")
    if first.endswith(".py") or (Path(first).is_file() and not os.access(first, os.X_OK)):
        if not Path(first).is_file():
            raise UsageError(f"{first}: there is no such script")
        return [sys.executable, *words]
    if first not in ("python", "python3") and shutil.which(first, path=environment.get("PATH")) is None:
        raise UsageError(f"{first}: there is no such script or program")
    # This interpreter has fog installed, even if its virtual environment is not activated.
    return [sys.executable if first in ("python", "python3") else first, *words[1:]]


def _variables(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment."""
    # OMP_NUM_THREADS=1 is torchrun's default too: ranks that share cores are slower with one thread per core each.
    # PYTHONUNBUFFERED makes the output of the ranks visible at once.
    variables = {"OMP_NUM_THREADS": "1"} if arguments.num_proc > 1 else {}
    variables |= {"PYTHONUNBUFFERED": "1"} | dict(environment)
    if not variables.get("FOG_JOB_SECRET") and arguments.only_host is None:  # the same on all hosts
        variables["FOG_JOB_SECRET"] = secrets.token_hex(32)
    if arguments.network_interface:
        names = ("FOG_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
        variables |= dict.fromkeys(names, arguments.network_interface)
    for entry in arguments.variables:
        name, is_given, value = entry.partition("=")
        if not name.isidentifier():
            raise UsageError(f"-x: got {entry!r}; allowed are NAME and NAME=VALUE")
        if not is_given and name not in environment:
            raise UsageError(f"-x {name}: it is not set here; give it a value: -x {name}=VALUE")
        if is_given:
            variables[name] = value
    return variables
