"""`fog run`: starts ranks on one host or several."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fog_cli import UsageError, add_command, keep_going, launchers, processes
from fog_cli.hosts import Host, is_local, parse_hosts, place, read_hostfile
from fog_cli.launchers import Command, Job

_EXAMPLES = """\
examples:
  fog run -np 4 train.py --epochs 3           4 ranks on this host
  fog run -np 4 python train.py --epochs 3    the same
  fog run -np 4 -m package.train              a module
  fog run -np 8 -H a:4,b:4 train.py           4 ranks on each of two hosts, which ssh reaches without a password
  fog run -np 8 --hostfile hosts train.py     lines "host slots=4" or "host:4"
  fog run -np 8 --launcher srun train.py      within an allocation of Slurm
  fog run -np 8 --keep-going train.py         the other ranks go on when one dies

Options come before the script; what follows it is the script's. Each line of output begins with its rank:
"[2] loss 0.31". The exit status is that of the rank that failed first; 2 if the command line is wrong, and then nothing
has been started.
"""


def add(subparsers: Any) -> None:
    """Describes the command."""
    parser = add_command(
        subparsers,
        "run",
        "start a script on several ranks",
        "Starts a script on several ranks: on this host by torchrun's machinery, on several by mpiexec or srun.",
        _EXAMPLES,
        usage="fog run -np N [options] [-m] script.py [arguments of the script]",
        allow_abbrev=False,
    )
    add_placing(parser)
    parser.add_argument(
        "--keep-going", action="store_true", help="when a rank dies, let the others go on; one agent per host"
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="with --keep-going: start a rank that died again, up to N times each (default: 0)",
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        metavar="M",
        help="with --keep-going on one host: let ranks be added, up to M in all (default: N); sets FOG_MAX_RANKS",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        metavar="K",
        help="with --keep-going: start only the ranks of host K, as each host starts its own (Kubernetes)",
    )
    parser.add_argument(
        "--log-dir", metavar="FOLDER", help="also write the output of each rank to FOLDER/rank-R.log"
    )
    parser.add_argument("--timeline-filename", metavar="PREFIX", help="write a timeline: sets FOG_TIMELINE")
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module, as with python -m"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="script.py ...",
        help="the script or program, and its arguments",
    )


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Describes the options that name hosts; other commands have them, too."""
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
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")


def add_placing(parser: argparse.ArgumentParser) -> None:
    """Describes the options that say where ranks are and how they start; other commands have them, too."""
    parser.add_argument(
        "-np", "--num-proc", type=int, required=True, metavar="N", help="how many ranks to start"
    )
    add_hosts(parser)
    parser.add_argument(
        "--network-interface",
        metavar="NIC",
        help="network interface for all traffic between hosts (FOG_INTERFACE and MPI's, Gloo's and NCCL's)",
    )
    parser.add_argument(
        "-x",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of all ranks; may be repeated",
    )
    parser.add_argument(
        "--prefix",
        default="",
        metavar="WORDS",
        help='words before the launcher, as in --prefix "numactl -m 0"',
    )
    parser.add_argument(
        "--extra-mpi-flags",
        default="",
        metavar="WORDS",
        help="more words for mpiexec or srun; with an equals sign, as in --extra-mpi-flags=-x",
    )
    parser.add_argument(
        "--launcher",
        choices=("auto", "torchrun", "mpiexec", "srun"),
        default="auto",
        help="what starts the ranks; auto: torchrun's machinery on this host, srun in a Slurm allocation, else mpiexec",
    )
    parser.add_argument(
        "--mpiexec",
        metavar="PATH",
        help="the mpiexec to use; default: the one of the package mpich, then the one on PATH",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show the launcher's command and set FOG_LOG_LEVEL=debug"
    )


def run(arguments: argparse.Namespace) -> int:
    """Starts the ranks and waits for their end."""
    if arguments.keep_going:
        return _keep_going(arguments)
    for option in ("--max-restarts", "--max-ranks", "--node-rank"):
        if getattr(arguments, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option}: it is an option of --keep-going, which is missing")
    command, environment = prepare(arguments, os.environ)
    _make_log_folder(arguments.log_dir)
    if arguments.verbose:
        print(f"fog run: {command}", file=sys.stderr, flush=True)
    try:
        return processes.run(command.words, environment | command.variables)
    except OSError as error:
        raise UsageError(f"{command.words[0]}: {error.strerror}") from error


def _keep_going(arguments: argparse.Namespace) -> int:
    plan = prepare_to_keep_going(arguments, os.environ)
    _make_log_folder(arguments.log_dir)
    if arguments.verbose:
        for start in plan.starts:
            if start is not None:
                print(f"fog run: {start}", file=sys.stderr, flush=True)
    try:
        return keep_going.run(plan)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error


def _make_log_folder(folder: str | None) -> None:
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--log-dir {folder}: Permission denied")


def prepare(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Command, dict[str, str]]:
    """Checks the command line and builds the launcher's command.

    Args:
        arguments: The parsed arguments.
        environment: The variables of this process.

    Returns:
        The launcher's command, and the environment for it, without the variables that the command adds itself.

    Raises:
        UsageError: The arguments are invalid.
    """
    given = given_hosts(arguments)
    job = _job(arguments, environment, given)
    launcher = choose_launcher(arguments.launcher, job.hosts, given is not None, environment)
    if launcher == "torchrun":
        return launchers.on_this_host(job), dict(job.environment)
    if launcher == "srun":
        _check_srun("--launcher srun")
        return launchers.by_srun(job, given is not None), dict(job.environment)
    mpiexec = find_mpiexec(arguments.mpiexec)
    return launchers.by_mpiexec(job, mpiexec, _version_of(mpiexec)), dict(job.environment)


def prepare_to_keep_going(arguments: argparse.Namespace, environment: Mapping[str, str]) -> keep_going.Plan:
    """Checks the command line of `fog run --keep-going` and builds the commands of the agents.

    Args:
        arguments: The parsed arguments.
        environment: The variables of this process.

    Raises:
        UsageError: The arguments are invalid.
    """
    if arguments.launcher in ("torchrun", "mpiexec"):
        raise UsageError(
            f"--launcher {arguments.launcher}: it ends all ranks when one dies; --keep-going starts them by agents of "
            "its own, on other hosts by ssh or srun"
        )
    restarts = arguments.max_restarts or 0
    if restarts < 0:
        raise UsageError(f"--max-restarts: got {restarts}; allowed are numbers from 0 on")
    given, node = given_hosts(arguments), arguments.node_rank
    if node is not None and given is None:
        raise UsageError("--node-rank: it is the number of a host; name the hosts with -H or --hostfile")
    launcher = "torchrun"
    if node is None:
        hosts = given or [Host("localhost", 1)]
        launcher = choose_launcher(arguments.launcher, hosts, given is not None, environment)
    if launcher == "srun":
        _check_srun("--keep-going")
        given = given or _allocated_hosts(arguments.num_proc, environment)
    job = _job(arguments, environment, given)
    most = job.ranks if arguments.max_ranks is None else arguments.max_ranks
    if most < job.ranks or (most > job.ranks and len(job.hosts) > 1):
        raise UsageError(
            f"--max-ranks: got {most}; allowed are numbers from -np on, {job.ranks}"
            + (", and no larger one on several hosts" if len(job.hosts) > 1 else "")
        )
    if most > job.ranks:
        job = replace(job, environment={**job.environment, "FOG_MAX_RANKS": str(most)})
    if node is not None and not 0 <= node < len(job.hosts):
        raise UsageError(f"--node-rank: got {node}; the ranks fill {len(job.hosts)} hosts, from 0 on")
    starts: list[Command | None] = []
    for number, host in enumerate(job.hosts):
        if node is not None:
            starts.append(launchers.agent_on_this_host(job) if number == node else None)
        elif launcher == "srun":
            starts.append(launchers.agent_by_srun(job, host))
        elif is_local(host.name):
            starts.append(launchers.agent_on_this_host(job))
        else:
            if shutil.which("ssh") is None:
                raise UsageError(
                    "--keep-going: there is no ssh on PATH, which starts the agents of other hosts"
                )
            starts.append(launchers.agent_by_ssh(job, host))
    if launcher != "srun" and job.flags:
        raise UsageError("--extra-mpi-flags: --keep-going uses no launcher of MPI; srun takes these")
    if len(job.hosts) == 1:
        return keep_going.Plan(job, starts, "127.0.0.1", 0, restarts, most)
    address = job.environment.get("MASTER_ADDR") or job.hosts[0].name
    if is_local(address) and node is None:
        address = socket.gethostname()  # "localhost" is another host there
    port = _port(job.environment.get("MASTER_PORT", ""))
    return keep_going.Plan(
        job, starts, address, port or (keep_going.DEFAULT_PORT if node is not None else 0), restarts, most
    )


def _port(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise UsageError(f"MASTER_PORT: got {text!r}; allowed are 0 to 65535")
    return int(text)


def check_ssh_port(port: int | None) -> None:
    """Raises UsageError if a port cannot be one."""
    if port is not None and not 1 <= port <= 65535:
        raise UsageError(f"--ssh-port: got {port}; allowed are 1 to 65535")


def given_hosts(arguments: argparse.Namespace) -> list[Host] | None:
    if arguments.hostfile:
        return read_hostfile(arguments.hostfile)
    return parse_hosts(arguments.hosts) if arguments.hosts else None


def _allocated_hosts(ranks: int, environment: Mapping[str, str]) -> list[Host]:
    """Returns the hosts of an allocation of Slurm, with about the same number of ranks each."""
    words = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", "")]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{shlex.join(words)}: {error}; name the hosts with -H") from error
    names = done.stdout.split()[:ranks]
    return [
        Host(name, ranks // len(names) + (number < ranks % len(names))) for number, name in enumerate(names)
    ]


def _check_srun(option: str) -> None:
    if shutil.which("srun") is None:
        raise UsageError(f"{option}: there is no srun on PATH")


def _job(arguments: argparse.Namespace, environment: Mapping[str, str], given: list[Host] | None) -> Job:
    """Checks the arguments of all launchers."""
    if arguments.num_proc < 1:
        raise UsageError(f"-np: got {arguments.num_proc}; allowed are numbers from 1 on")
    check_ssh_port(arguments.ssh_port)
    variables = _variables(arguments, environment)
    folder = getattr(arguments, "log_dir", None)
    job = Job(
        ranks=arguments.num_proc,
        hosts=place(given, arguments.num_proc) if given else [Host("localhost", arguments.num_proc)],
        command=rank_command(arguments.command, arguments.module, variables),
        environment=variables,
        ssh_port=arguments.ssh_port,
        interface=arguments.network_interface,
        prefix=_words("--prefix", arguments.prefix),
        flags=_words("--extra-mpi-flags", arguments.extra_mpi_flags),
        as_root=os.geteuid() == 0,
        log_folder=str(Path(folder).absolute()) if folder else None,
    )
    if job.prefix and shutil.which(job.prefix[0]) is None:
        raise UsageError(f"--prefix: got {job.prefix[0]!r}, which is no program")
    return job


def _words(option: str, text: str) -> list[str]:
    """The words of an option's value, split as a shell does it."""
    try:
        return shlex.split(text)
    except ValueError as error:  # an unbalanced quotation mark
        raise UsageError(f"{option}: got {text!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def choose_launcher(asked: str, hosts: Sequence[Host], given: bool, environment: Mapping[str, str]) -> str:
    """Returns "torchrun", "mpiexec" or "srun".

    Raises:
        UsageError: torchrun is requested with other hosts than this one, or srun outside of an allocation.
    """
    others = [host.name for host in hosts if not is_local(host.name)]
    allocated = "SLURM_JOB_ID" in environment
    if asked == "torchrun" and others:
        raise UsageError(
            f"--launcher torchrun: it starts ranks of this host only, got {', '.join(others)}. "
            "Start `torchrun --nnodes` on each host, or take --launcher mpiexec"
        )
    if asked == "srun" and not allocated:
        raise UsageError(
            "--launcher srun: this is no allocation of Slurm (SLURM_JOB_ID is not set): begin with salloc or sbatch"
        )
    if asked != "auto":
        return asked
    nodes = environment.get("SLURM_JOB_NUM_NODES", "1")
    if allocated and (others or (not given and nodes.isdecimal() and int(nodes) > 1)):
        return "srun"
    return "mpiexec" if others else "torchrun"


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
        package = first.partition(".")[0]
        here = any(Path(package + end).exists() for end in ("", ".py"))
        if not here and importlib.util.find_spec(package) is None:
            raise UsageError(f"-m {first}: there is no module {package}")
        return [sys.executable, "-m", *words]
    if first.startswith("-"):
        raise UsageError(f"{first}: no option of fog run; `fog run --help` lists them")
    if first.endswith(".py") or (Path(first).is_file() and not os.access(first, os.X_OK)):
        _check_script(first)
        return [sys.executable, *words]
    if first not in ("python", "python3") and shutil.which(first, path=environment.get("PATH")) is None:
        raise UsageError(f"{first}: there is no such script or program")
    if re.fullmatch(r"python[\d.]*", Path(first).name) and len(words) > 1 and not words[1].startswith("-"):
        _check_script(words[1])
    # This interpreter has fog installed, even if its virtual environment is not activated.
    return [sys.executable if first in ("python", "python3") else first, *words[1:]]


def _check_script(path: str) -> None:
    if not Path(path).is_file():
        raise UsageError(f"{path}: there is no such script")


def _variables(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment."""
    # OMP_NUM_THREADS=1 is torchrun's default too: ranks that share cores are slower with one thread per core each.
    # PYTHONUNBUFFERED makes the output of the ranks visible at once.
    variables = {"OMP_NUM_THREADS": "1"} if arguments.num_proc > 1 else {}
    variables |= {"PYTHONUNBUFFERED": "1"} | dict(environment)
    # With --node-rank each host has a `fog run` of its own, and rank 0 makes the secret.
    if getattr(arguments, "node_rank", None) is None and not variables.get("FOG_JOB_SECRET"):
        variables["FOG_JOB_SECRET"] = secrets.token_hex(32)
    if arguments.network_interface:
        names = ("FOG_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
        variables |= dict.fromkeys(names, arguments.network_interface)
    if arguments.verbose:
        variables["FOG_LOG_LEVEL"] = "debug"
    if getattr(arguments, "timeline_filename", None):
        variables["FOG_TIMELINE"] = arguments.timeline_filename
    for entry in arguments.variables:
        name, is_given, value = entry.partition("=")
        if not name.isidentifier():
            raise UsageError(f"-x: got {entry!r}; allowed are NAME and NAME=VALUE")
        if not is_given and name not in environment:
            raise UsageError(f"-x {name}: it is not set here; give it a value: -x {name}=VALUE")
        if is_given:
            variables[name] = value
    return variables


def find_mpiexec(named: str | None) -> str:
    """Returns the path of an mpiexec.

    Raises:
        UsageError: There is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = shutil.which(named) if named else str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise UsageError(
            f"--mpiexec {named}: there is no such program"
            if named
            else "there is no mpiexec: pip install 'mpich>=5', or name one with --mpiexec"
        )
    return found


def _version_of(mpiexec: str) -> str:
    try:
        done = subprocess.run(
            [mpiexec, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{mpiexec} --version: {error}") from error
    return done.stdout.decode(errors="replace")
