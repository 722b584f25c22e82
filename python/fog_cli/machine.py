"""The checks of `fog doctor` that do not need torch: limits, memory, network and namespaces of this machine."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


def _finding(name: str, state: str, text: str, advice: str = "") -> Finding:
    return Finding("machine", name, state, text, advice)


def descriptors() -> Finding:
    """Checks the limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} open files, at most {_number(hard)} (ulimit -n)"
    enough = soft == resource.RLIM_INFINITY or soft >= _DESCRIPTORS_COMFORTABLE
    if enough:
        return _finding("descriptors", "ok", text)
    state = "bad" if soft < _DESCRIPTORS_NEEDED else "note"
    return _finding(
        "descriptors",
        state,
        text,
        f"a rank needs about 40, and one for each other rank of its host: ulimit -n {_DESCRIPTORS_COMFORTABLE}; "
        "for all logins in /etc/security/limits.conf, in Docker --ulimit nofile=65536",
    )


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def shared_memory(folder: str = "/dev/shm") -> Finding:
    """Checks /dev/shm, which MPI and DataLoader use; fog's own shared memory does not."""
    advice = (
        "DataLoader workers and MPI need it, fog does not. "
        "In Docker: --shm-size=1g; else: mount -o remount,size=1g /dev/shm"
    )
    try:
        total, _, free = shutil.disk_usage(folder)
    except OSError as error:
        return _finding("shared memory", "note", f"{folder}: {error.strerror}", advice)
    text = f"{folder}: {total // _MIB} MiB, {free // _MIB} MiB free"
    if free < _SHM_COMFORTABLE:
        return _finding("shared memory", "note", text, advice)
    return _finding("shared memory", "ok", text)


def anonymous_files() -> Finding:
    """Checks that memfd works and that another process can open it by /proc: the ranks of a host share memory so."""
    try:
        descriptor = os.memfd_create("fog_doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return _finding(
            "ranks share memory",
            "bad",
            f"memfd_create: {error.strerror}",
            "a filter of system calls (seccomp) may forbid it",
        )
    try:
        code = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code, path], capture_output=True, text=True, timeout=20, check=False
        )
    finally:
        os.close(descriptor)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it failed"]
        return _finding(
            "ranks share memory",
            "note",
            f"a process cannot open another one's memory by /proc: {last[0]}",
            "ranks of this host then exchange messages over TCP, which is slower; "
            "look at hidepid of /proc and at the container's user",
        )
    return _finding("ranks share memory", "ok", "memfd, opened by /proc")


def tracing() -> Finding:
    """Checks yama's ptrace scope, which may forbid UCX's copies between processes (process_vm_readv), not fog's."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return _finding("ptrace", "ok", "not restricted by yama")
    if scope == "0" or os.geteuid() == 0:
        return _finding("ptrace", "ok", f"yama's ptrace_scope is {scope}")
    return _finding(
        "ptrace",
        "note",
        f"yama's ptrace_scope is {scope}",
        "fog does not need it. MPI RMA between ranks of this host and py-spy do: sysctl kernel.yama.ptrace_scope=0",
    )


def interfaces() -> Finding:
    """Lists the network interfaces that other hosts may reach."""
    names = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    if not names:
        return _finding(
            "network",
            "note",
            "no network interface is up but the loopback",
            "one host works; for several, give the container a network (--network=host)",
        )
    return _finding("network", "ok", f"interfaces that are up: {', '.join(names)}")


def _is_up(name: str) -> bool:
    try:
        return Path(f"/sys/class/net/{name}/operstate").read_text().strip() in ("up", "unknown")
    except OSError:
        return True


def loopback() -> Finding:
    """Checks the loopback interface, over which the ranks of one host connect."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return _finding("loopback", "ok", "127.0.0.1 connects")
    except OSError as error:
        return _finding(
            "loopback",
            "bad",
            f"127.0.0.1 does not connect: {error.strerror or error}",
            "bring it up: ip link set lo up",
        )


def host_name() -> Finding:
    """Checks whether this host's name resolves to an address that other hosts can reach."""
    name = socket.gethostname()
    advice = (
        f"ranks on other hosts find rank 0 by its name: add {name} to /etc/hosts or DNS, "
        "or set MASTER_ADDR to an address"
    )
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return _finding("host name", "note", f"{name} does not resolve: {error.strerror or error}", advice)
    shown = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return _finding("host name", "note", f"{shown}, which other hosts cannot reach", advice)
    return _finding("host name", "ok", shown)


def memory() -> Finding:
    """Checks the free memory and the limit of the control group."""
    free = _free_memory()
    limit = _group_limit()
    text = f"{free // _MIB} MiB free" + (f", the control group allows {limit // _MIB} MiB" if limit else "")
    if free < 512 * _MIB:
        return _finding("memory", "note", text, "two ranks that import torch take about 500 MiB")
    return _finding("memory", "ok", text)


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _group_limit() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def network_namespaces() -> Finding:
    """Checks whether this machine can emulate several hosts, as fog's own tests and benchmarks do."""
    name = "emulated hosts"
    advice = (
        "only fog's tests and benchmarks of several hosts need them: "
        "root (Docker: --privileged), and the program ip of iproute2"
    )
    if shutil.which("ip") is None:
        return _finding(name, "note", "there is no program ip", advice)
    pid = os.fork()
    if pid == 0:
        new_network = 0x40000000  # CLONE_NEWNET of <sched.h>
        os._exit(0 if ctypes.CDLL(None, use_errno=True).unshare(new_network) == 0 else 1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        return _finding(name, "note", "this user cannot make network namespaces", advice)
    return _finding(name, "ok", "network namespaces can be made")


CHECKS: tuple[Callable[[], Finding], ...] = (
    descriptors,
    memory,
    shared_memory,
    anonymous_files,
    tracing,
    loopback,
    interfaces,
    host_name,
    network_namespaces,
)


def findings() -> Iterator[Finding]:
    """Runs all checks. An unexpected exception in a check becomes a finding too."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            yield _finding(
                check.__name__.replace("_", " "),
                "note",
                f"could not be looked at: {type(error).__name__}: {error}",
            )
