"""Several hosts on one machine: network namespaces, joined by a bridge in one of their own.

A process in one of them reaches the others by TCP only, over links whose rate can be limited. Needs Linux, root, and
the programs ip and tc of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

# What keeps an MPI from using memory that namespaces share, as hosts do not.
ACROSS = {
    "UCX": {"UCX_TLS": "tcp"},
    "OFI": {"MPICH_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
# Of each host: its end of the link.
INTERFACE = "eth0"
# What a limited link sends at once. Four of TCP's largest packets: with one, a kernel that is busy wakes up too late for
# each next one, and TCP by itself got 0.4 of 1 Gbit/s through; with four it gets all.
BURST = "256kb"


class Unavailable(Exception):
    """This machine, or this user, cannot emulate hosts; says why."""


def ip(*words: str) -> str:
    """Runs the program ip; returns what it printed."""
    return _output("ip", *words)


def address(host: int) -> str:
    """The address of a host of `emulated_hosts`, counted from 0."""
    return f"10.213.77.{host + 1}"


def inside(name: str) -> list[str]:
    """The words before a command that is to run on a host, by its name."""
    return ["ip", "netns", "exec", name]


@contextlib.contextmanager
def emulated_hosts(count: int, rate: str | None = None) -> Iterator[list[str]]:
    """Names of network namespaces that reach each other; they are gone afterwards.

    Args:
        count: How many.
        rate: Limit of what each can send, in the words of tc: "400mbit".

    Raises:
        Unavailable: They cannot be made here.
    """
    if os.geteuid() != 0:
        raise Unavailable("needs root to make network namespaces")
    for program in ["ip"] if rate is None else ["ip", "tc"]:
        if shutil.which(program) is None:
            raise Unavailable(f"needs the program {program}")
    names = [f"fog-{os.getpid()}-{number}" for number in range(count)]
    switch = f"fog-{os.getpid()}-switch"
    made = []
    try:
        try:
            for name in [switch, *names]:
                ip("netns", "add", name)
                made.append(name)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names):
                port = f"port{number}"
                peer = ["peer", "name", INTERFACE, "netns", name]
                ip("-n", switch, "link", "add", port, "type", "veth", *peer)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "up")
                ip("-n", name, "link", "set", "lo", "up")
                if rate is not None:
                    limit = ["tbf", "rate", rate, "burst", BURST, "latency", "50ms"]
                    _output("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout
