"""The checks of `fog doctor` that do not need torch: limits, memory and network of this machine."""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_MIB = 1 << 20
# A rank opens about 40 descriptors, and one more for each other rank of its host.
_DESCRIPTORS_NEEDED, _DESCRIPTORS_COMFORTABLE = 64, 1024
# DataLoader's workers and MPI share memory through files in /dev/shm; fog's own shared memory has no file there.
_SHM_COMFORTABLE = 64 * _MIB


@dataclass(frozen=True)
class Finding:
    """One line of the report of `fog doctor`.

    Attributes:
        area: "versions", "machine" or "self-test".
        name: The part that was checked.
        state: "ok", "bad" if ranks of a single host do not work, or "note" if only other features may fail.
        text: The result of the check.
        advice: How to fix it; "" if nothing needs to be fixed.
    """

    area: str
    name: str
    state: str
    text: str
    advice: str = ""


# What a check finds: the state, the text and the advice of a `Finding`. The advice counts unless the state is "ok".
_Found = tuple[str, str, str]


def _descriptors() -> _Found:
    """The limit of open files."""
    soft, hard = (
        "any number of" if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    state = "ok"
    if isinstance(soft, int) and soft < _DESCRIPTORS_COMFORTABLE:
        state = "bad" if soft < _DESCRIPTORS_NEEDED else "note"
    advice = (
        f"a rank needs about 40, and one for each other rank of its host: ulimit -n {_DESCRIPTORS_COMFORTABLE}; "
        "for all logins in /etc/security/limits.conf, in Docker --ulimit nofile=65536"
    )
    return state, f"{soft} open files, at most {hard} (ulimit -n)", advice


def _shared_memory() -> _Found:
    """/dev/shm, which MPI and DataLoader use; fog's own shared memory does not."""
    total, _, free = shutil.disk_usage("/dev/shm")
    advice = (
        "DataLoader workers and MPI need it, fog does not. "
        "In Docker: --shm-size=1g; else: mount -o remount,size=1g /dev/shm"
    )
    text = f"/dev/shm: {total // _MIB} MiB, {free // _MIB} MiB free"
    return "note" if free < _SHM_COMFORTABLE else "ok", text, advice


def _anonymous_files() -> _Found:
    """Whether memfd works and another process can open it by /proc: the ranks of a host share memory so."""
    try:
        descriptor = os.memfd_create("fog_doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return "bad", f"memfd_create: {error.strerror}", "a filter of system calls (seccomp) may forbid it"
    try:
        code = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, path], capture_output=True, text=True, timeout=20, check=False
        )
    finally:
        os.close(descriptor)
    if done.returncode == 0:
        return "ok", "memfd, opened by /proc", ""
    last = done.stderr.strip().splitlines()[-1:] or ["it failed"]
    advice = (
        "ranks of this host then exchange messages over TCP, which is slower; "
        "look at hidepid of /proc and at the container's user"
    )
    return "note", f"a process cannot open another one's memory by /proc: {last[0]}", advice


def _loopback() -> _Found:
    """The loopback interface, over which the ranks of one host connect."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return "ok", "127.0.0.1 connects", ""
    except OSError as error:
        text = f"127.0.0.1 does not connect: {error.strerror or error}"
        return "bad", text, "bring it up: ip link set lo up"


def _host_name() -> _Found:
    """Whether this host's name resolves to an address that other hosts can reach."""
    name = socket.gethostname()
    advice = (
        f"ranks on other hosts find rank 0 by its name: add {name} to /etc/hosts or DNS, "
        "or set MASTER_ADDR to an address"
    )
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return "note", f"{name} does not resolve: {error.strerror or error}", advice
    shown = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return "note", f"{shown}, which other hosts cannot reach", advice
    return "ok", shown, ""


_CHECKS: Mapping[str, Callable[[], _Found]] = {
    "descriptors": _descriptors,
    "shared memory": _shared_memory,
    "ranks share memory": _anonymous_files,
    "loopback": _loopback,
    "host name": _host_name,
}


def findings() -> Iterator[Finding]:
    """Runs all checks. An unexpected exception in a check becomes a finding too."""
    for name, check in _CHECKS.items():
        try:
            state, text, advice = check()
        except Exception as error:
            state, text, advice = "note", f"could not be looked at: {type(error).__name__}: {error}", ""
        yield Finding("machine", name, state, text, advice if state != "ok" else "")
