"""Several hosts on one machine: network namespaces, joined by bridges in namespaces of their own.

A process in one of them reaches the others by TCP only, over links that can have a rate, lose packets, and be cut for a
while; a line between two data centers can take a time as well. Needs Linux, root, and the programs ip and tc of iproute2.
The namespaces of a program that was killed are removed when the next one starts: their names contain the process that
made them, and when it started.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import ipaddress
import itertools
import json
import math
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# What keeps an MPI from using memory that namespaces share, as hosts do not.
ACROSS = {
    "UCX": {"UCX_TLS": "tcp"},
    "OFI": {"MPICH_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"},
}
# Of each host: its end of the link.
INTERFACE = "eth0"
# What a limited link sends at once, in seconds at its rate: four of TCP's largest packets at 1 Gbit/s. With one, a kernel
# that is busy wakes up too late for each next one, and TCP by itself got 0.4 of 1 Gbit/s through; with four it gets all.
BURST_SECONDS = 2e-3
# Of a slow link, in bytes: the largest packet that TCP gives to a link, with its headers. One that is larger than the
# burst is cut into frames, each of which takes the processor as long as the whole.
LEAST_BURST = 70_000
# What a limited link keeps of what it cannot send yet: so much at its rate, and at least so many bytes, so that the
# packets of 64 KiB of several connections find room in a slow one.
QUEUE_SECONDS, LEAST_QUEUE = 0.05, 512 << 10
# Of <linux/if_tun.h>: a device whose frames a program reads and writes; with a header of so many bytes, the system passes
# TCP's packets of 64 KiB as they are.
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_FRAME_HEADER, _MOST_OF_FRAME = 12, 70_000
# Of <sched.h> and <sys/mount.h>.
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 0x2
_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"fog-(?P<pid>\d+)(-(?P<start>\d+))?-(switch\d*|\d+)")


# Where packets go that a kernel without the action "drop" drops: a bridge without ports.
_SINK = "fog-sink"
# Classic BPF as `tc ... bpf bytecode` takes it: operation, jump if true, jump if false, constant.
_LOAD_HALF, _LOAD_WORD, _EQUAL, _AT_LEAST, _RETURN = 0x28, 0x20, 0x15, 0x35, 0x06
# Loads a random number in place of a word of the packet: SKF_AD_OFF + SKF_AD_RANDOM of <linux/filter.h>.
_RANDOM = 2**32 - 0x1000 + 56
# Of a frame: where its type stands, and in an IPv4 header its two addresses.
_TYPE, _SOURCE, _DESTINATION, _IPV4 = 12, 26, 30, 0x0800


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


def missing(*, shaped: bool = True) -> str | None:
    """What emulated hosts need and this machine or user lacks; None if nothing.

    Args:
        shaped: Whether rates are to be limited.
    """
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for program in ["ip", "tc"] if shaped else ["ip"]:
        if shutil.which(program) is None:
            return f"needs the program {program} of iproute2"
    return None


@contextlib.contextmanager
def emulated_hosts(
    count: int,
    rate: str | None = None,
    *,
    rates: Mapping[int, str] | None = None,
    centers: int | Sequence[int] = 1,
    between: str | None = None,
    delay: float = 0.0,
) -> Iterator[list[str]]:
    """Names of network namespaces that reach each other; they are gone afterwards, with what runs in them.

    Args:
        count: How many.
        rate: Limit of what each can send, and of what each can receive, in the words of tc: "400mbit".
        rates: The same of single hosts, by number, instead.
        centers: Data centers that consecutive hosts are divided into, each with a bridge: how many, with equally many
            hosts in each, or the number of hosts of each.
        between: Limit, each way, of the link from each center to the next.
        delay: Seconds that this link takes, each way. Netem, which not every kernel has, is not needed.

    Raises:
        ValueError: Hosts cannot be divided so.
        Unavailable: They cannot be made here.
    """
    if isinstance(centers, int):
        if count < 1 or centers < 1 or count % centers:
            raise ValueError(f"count must be a multiple of centers, got {count} hosts in {centers} centers")
        centers = [count // centers] * centers
    if sum(centers) != count or min(centers) < 1:
        raise ValueError(f"centers must have {count} hosts together, and each at least one, got {centers}")
    if reason := missing(shaped=bool(rate or rates or between)):
        raise Unavailable(reason)
    remove_leftovers()
    prefix = f"fog-{os.getpid()}-{_start_of(os.getpid())}"
    names = [f"{prefix}-{number}" for number in range(count)]
    switches = [f"{prefix}-switch{center}" for center in range(len(centers))]
    switch_of = [switch for switch, hosts in zip(switches, centers, strict=True) for _ in range(hosts)]
    made = []
    stack = contextlib.ExitStack()
    try:
        try:
            for name in [*switches, *names]:
                ip("netns", "add", name)
                made.append(name)
            for switch in switches:
                ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                ip("-n", switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names):
                switch, port = switch_of[number], f"port{number}"
                peer = ["peer", "name", INTERFACE, "netns", name]
                ip("-n", switch, "link", "add", port, "type", "veth", *peer)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", name, "address", "add", f"{address(number)}/24", "dev", INTERFACE)
                ip("-n", name, "link", "set", INTERFACE, "up")
                ip("-n", name, "link", "set", "lo", "up")
                own = (rates or {}).get(number, rate)
                if own is not None:
                    limit_rate(INTERFACE, own, namespace=name)
                    limit_rate(port, own, namespace=switch)
            for center, (here, there) in enumerate(itertools.pairwise(switches)):
                ends = f"next{center}", f"last{center}"
                if delay:
                    stack.enter_context(_delayed_link(here, there, ends, delay))
                else:
                    peer = ["peer", "name", ends[1], "netns", there]
                    ip("-n", here, "link", "add", ends[0], "type", "veth", *peer)
                for switch, end in zip((here, there), ends, strict=True):
                    ip("-n", switch, "link", "set", end, "master", "bridge", "up")
                    if between is not None:
                        limit_rate(end, between, namespace=switch)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        except OSError as error:  # of a delayed link
            raise Unavailable(f"/dev/net/tun: {error}") from error
        yield names
    finally:
        stack.close()
        for name in made:
            _remove(name)


@contextlib.contextmanager
def _delayed_link(here: str, there: str, names: tuple[str, str], delay: float) -> Iterator[None]:
    """Makes a device in each of two namespaces; a thread moves the frames of each to the other one, so much later."""
    ends = [_tap(*each) for each in zip((here, there), names, strict=True)]
    closing, close = os.pipe()
    thread = threading.Thread(target=_move_frames, args=(ends, delay, closing), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(close)
        thread.join()
        for each in (*ends, closing):
            os.close(each)


def _tap(namespace: str, name: str) -> int:
    """Makes a device whose frames this process reads and writes, in a namespace; returns its descriptor."""
    with concurrent.futures.ThreadPoolExecutor(1) as other:  # this thread stays in its namespace
        other.submit(move_to_host, namespace).result()
        device = other.submit(os.open, "/dev/net/tun", os.O_RDWR | os.O_NONBLOCK).result()
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        other.submit(fcntl.ioctl, device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags)).result()
    fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _FRAME_HEADER))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device


def _move_frames(ends: Sequence[int], delay: float, closing: int) -> None:
    """Moves frames from each end to the other one until `closing` can be read."""
    held: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    while True:
        due = min((frames[0][0] for frames in held if frames), default=math.inf)
        patience = None if math.isinf(due) else max(0.0, due - time.monotonic())
        ready, _, _ = select.select([*ends, closing], [], [], patience)
        if closing in ready:
            return
        for end, frames in zip(ends, held, strict=True):
            if end in ready:
                frames.append((time.monotonic() + delay, os.read(end, _MOST_OF_FRAME)))
        for end, frames in zip(reversed(ends), held, strict=True):
            while frames and frames[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # a device that is not up yet, or is full, drops it
                    os.write(end, frames.popleft()[1])


def change_rate(names: Sequence[str], rate: str) -> None:
    """Limits the links of all hosts of `emulated_hosts` in one bridge anew."""
    switch = f"{names[0].rsplit('-', 1)[0]}-switch0"
    for number, name in enumerate(names):
        limit_rate(INTERFACE, rate, namespace=name)
        limit_rate(f"port{number}", rate, namespace=switch)


def change_between(names: Sequence[str], rate: str) -> None:
    """Limits the link between the two data centers of `emulated_hosts` anew."""
    prefix = names[0].rsplit("-", 1)[0]
    for center, end in enumerate(("next0", "last0")):
        limit_rate(end, rate, namespace=f"{prefix}-switch{center}")


def cut_between(
    names: Sequence[str], directions: Sequence[str] = ("egress", "ingress")
) -> contextlib.AbstractContextManager[None]:
    """Drops all between the first data center of `emulated_hosts` and the next one in a block.

    Args:
        names: Of the hosts.
        directions: "egress" for what the first one sends, "ingress" for what it receives.
    """
    switch = f"{names[0].rsplit('-', 1)[0]}-switch0"
    return lossy_link("next0", 1.0, namespace=switch, directions=directions)


def traffic(names: Sequence[str]) -> list[tuple[int, int]]:
    """Bytes that each host has sent and received since it was made, counted by the bridges' ports."""
    prefix = names[0].rsplit("-", 1)[0]
    found: dict[int, tuple[int, int]] = {}
    for switch in sorted(_NAMESPACES.glob(f"{prefix}-switch*")):
        for link in json.loads(ip("-n", switch.name, "-s", "-json", "link", "show")):
            if link["ifname"].startswith("port"):
                counted = link["stats64"]
                found[int(link["ifname"][4:])] = counted["rx"]["bytes"], counted["tx"]["bytes"]
    return [found[number] for number in range(len(names))]


def move_to_host(name: str) -> None:
    """Moves this thread, and the threads and processes that it starts, to an emulated host, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int, what: str) -> None:
        if status != 0:
            raise OSError(ctypes.get_errno(), what)

    namespace = os.open(_NAMESPACES / name, os.O_RDONLY)
    check(libc.setns(namespace, _CLONE_NEWNET), "setns")
    os.close(namespace)
    # The network's devices are in /sys as well, which is that of the namespace in which it was mounted.
    check(libc.unshare(_CLONE_NEWNS), "unshare")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None), "mount")
    check(libc.umount2(b"/sys", _MNT_DETACH), "umount")
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None), "mount of /sys")


def remove_leftovers() -> list[str]:
    """Removes the hosts of programs that have ended without doing so, and what runs in them; returns their names."""
    removed = []
    for entry in sorted(_NAMESPACES.glob("fog-*")):
        parts = _NAME.fullmatch(entry.name)
        if parts is None:
            continue
        start = _start_of(int(parts["pid"]))
        # Another process may have got the number since.
        is_gone = start is None or (parts["start"] is not None and start != int(parts["start"]))
        if is_gone:
            _remove(entry.name)
            removed.append(entry.name)
    return removed


def _remove(name: str) -> None:
    """Ends what runs in a namespace, and deletes it; it may be gone, or be left without its mount."""
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in map(int, ip("netns", "pids", name).split()):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.CalledProcessError):
        ip("netns", "delete", name)
    with contextlib.suppress(OSError):
        (_NAMESPACES / name).unlink()


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def parse_rate(text: str) -> float:
    """Bits per second of a rate in the words of tc: "400mbit", "1gbit"."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number, unit = text[:-4], text[-4:].lower()
    if unit not in units or not float(number) > 0:
        raise ValueError(f"a rate must be a number of kbit, mbit or gbit, such as 1gbit; got {text}")
    return float(number) * units[unit]


def rate_text(bits: float) -> str:
    """The inverse, to the next kbit."""
    return f"{max(1, round(bits / 1e3))}kbit"


def limit_rate(device: str, rate: str, *, namespace: str) -> None:
    """Limits what a device sends, from now on; what waits for an earlier limit is kept.

    Raises:
        ValueError: `rate` is no rate.
        subprocess.CalledProcessError: tc failed.
    """
    bytes_per_second = parse_rate(rate) / 8
    burst = max(LEAST_BURST, round(BURST_SECONDS * bytes_per_second))
    queue = burst + max(LEAST_QUEUE, round(QUEUE_SECONDS * bytes_per_second))
    words = ["tbf", "rate", rate, "burst", str(burst), "limit", str(queue)]
    _output("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", "1:", *words)


@contextlib.contextmanager
def lossy_link(
    device: str,
    loss: float,
    *,
    namespace: str,
    peer: str | None = None,
    directions: Sequence[str] = ("egress", "ingress"),
) -> Iterator[None]:
    """Drops a random part of the packets that a host's device sends and receives in a block, with no word to anybody.

    TCP gives up to 64 KiB to a device as one packet, which is then lost as a whole.

    Args:
        device: The network device.
        loss: The probability, in each of the directions.
        namespace: The host.
        peer: An IPv4 address: only packets to it and from it are dropped. By default all.
        directions: "egress" for what the device sends, "ingress" for what it receives.

    Raises:
        Unavailable: The kernel cannot do it, or the device's packets are filtered already.
    """
    other = None if peer is None else int(ipaddress.IPv4Address(peer))
    with contextlib.ExitStack() as stack:
        try:
            _output("tc", "-n", namespace, "qdisc", "add", "dev", device, "clsact")
            stack.callback(_forget, "tc", "-n", namespace, "qdisc", "delete", "dev", device, "clsact")
            for direction in directions:
                program = _program(loss, other, _DESTINATION if direction == "egress" else _SOURCE)
                words = ["filter", "add", "dev", device, direction, "bpf", "bytecode", program, "action"]
                try:
                    _output("tc", "-n", namespace, *words, "drop")
                except subprocess.CalledProcessError:
                    if direction == directions[0]:
                        ip("-n", namespace, "link", "add", _SINK, "type", "bridge")
                        stack.callback(_forget, "ip", "-n", namespace, "link", "delete", _SINK)
                        ip("-n", namespace, "link", "set", _SINK, "up")
                    _output("tc", "-n", namespace, *words, "mirred", "egress", "redirect", "dev", _SINK)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr}") from error
        yield


def cut_link(
    device: str, *, namespace: str, peer: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """Drops all that a host's device sends and receives in a block; as `lossy_link`."""
    return lossy_link(device, 1.0, namespace=namespace, peer=peer)


@contextlib.contextmanager
def slow_link(device: str, rate: str, *, namespace: str) -> Iterator[None]:
    """Limits what a host's device sends in a block, to a rate in the words of tc."""
    limit_rate(device, rate, namespace=namespace)
    try:
        yield
    finally:
        _forget("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")


def _forget(*words: str) -> None:
    """Removes something that may be gone, with its host."""
    subprocess.run(words, capture_output=True, timeout=10, check=False)


def _program(loss: float, peer: int | None, offset: int) -> str:
    """A classifier that matches packets with this probability, and only those with this address if one is given."""
    tests = []  # of which each must hold
    if peer is not None:
        tests += [[(_LOAD_HALF, _TYPE), (_EQUAL, _IPV4)], [(_LOAD_WORD, offset), (_EQUAL, peer)]]
    chance = [(_LOAD_WORD, _RANDOM), (_AT_LEAST, round(loss * 2**32))] if loss < 1.0 else []
    steps = [step for test in tests for step in test] + chance
    program: list[tuple[int, int, int, int]] = []
    for number, (operation, constant) in enumerate(steps):
        rest = len(steps) - number - 1
        if operation == _EQUAL:  # goes on, or to the end: no match
            program.append((operation, 0, rest + 1, constant))
        elif operation == _AT_LEAST:
            program.append((operation, rest + 1, 0, constant))
        else:
            program.append((operation, 0, 0, constant))
    program += [(_RETURN, 0, 0, 2**32 - 1), (_RETURN, 0, 0, 0)]
    return ",".join([str(len(program)), *(" ".join(map(str, step)) for step in program)])


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout
