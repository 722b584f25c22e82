"""Faults of a link: it carries nothing, little, or not everything. By tc of iproute2, as root.

A device is that of this network namespace, or of a named one (`ip netns`). What is lost, is lost in silence: neither
side is told, as with a broken switch.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import subprocess
from collections.abc import Iterator

from fogdist.testing.faults.commands import Unavailable, reason_of, run

# What a limited link sends at once, in seconds at its rate: four of TCP's largest packets at 1 Gbit/s. With one, a kernel
# that is busy wakes up too late for each next one, and TCP by itself got 0.4 of 1 Gbit/s through; with four it gets all.
BURST_SECONDS = 2e-3
# Of a slow link, in bytes: the largest packet that TCP gives to a link, with its headers. One that is larger than the
# burst is cut into frames, each of which takes the processor as long as the whole.
LEAST_BURST = 70_000
# What a limited link keeps of what it cannot send yet: so much at its rate, and at least so many bytes, so that the
# packets of 64 KiB of several connections find room in a slow one.
QUEUE_SECONDS, LEAST_QUEUE = 0.05, 512 << 10

# Queues that Linux gives to a device by itself.
_DEFAULT_QUEUES = {"noqueue", "pfifo_fast", "fq_codel", "fq", "mq"}
# Where packets go that a kernel without the action "drop" drops: a bridge without ports.
_SINK = "fogdist-sink"

# Classic BPF as `tc ... bpf bytecode` takes it: operation, jump if true, jump if false, constant.
_LOAD_HALF, _LOAD_WORD, _EQUAL, _AT_LEAST, _RETURN = 0x28, 0x20, 0x15, 0x35, 0x06
# Loads a random number in place of a word of the packet: SKF_AD_OFF + SKF_AD_RANDOM of <linux/filter.h>.
_RANDOM = 2**32 - 0x1000 + 56
# Of a frame: where its type stands, and in an IPv4 header its two addresses.
_TYPE, _SOURCE, _DESTINATION, _IPV4 = 12, 26, 30, 0x0800


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


def limit_rate(device: str, rate: str, *, namespace: str | None = None) -> None:
    """Limits what a device sends, from now on.

    Raises:
        ValueError: `rate` is no rate.
        subprocess.CalledProcessError: tc failed.
    """
    bytes_per_second = parse_rate(rate) / 8
    burst = max(LEAST_BURST, round(BURST_SECONDS * bytes_per_second))
    queue = burst + max(LEAST_QUEUE, round(QUEUE_SECONDS * bytes_per_second))
    words = ["rate", rate, "burst", str(burst), "limit", str(queue)]
    _tc(namespace, "qdisc", "add", "dev", device, "root", "handle", "1:", "tbf", *words)


@contextlib.contextmanager
def cut_link(device: str, *, peer: str | None = None, namespace: str | None = None) -> Iterator[None]:
    """Drops all that a device sends and receives in a block.

    A process that is killed in the block leaves the link cut: see `mend_link`.

    Args:
        device: The network device, such as "eth0".
        peer: An IPv4 address: only packets to it and from it are dropped. By default all.
        namespace: The network namespace of the device, by default this one.

    Raises:
        ValueError: `peer` is no IPv4 address.
        Unavailable: It needs root, or tc; there is no such device, or its packets are filtered already.
    """
    with _dropping(device, 1.0, peer, namespace):
        yield


@contextlib.contextmanager
def lossy_link(
    device: str, loss: float, *, peer: str | None = None, namespace: str | None = None
) -> Iterator[None]:
    """Drops a random part of the packets that a device sends and receives in a block.

    TCP gives up to 64 KiB to a device as one packet, which is then lost as a whole.

    Args:
        device: As in `cut_link`.
        loss: The probability, in each direction.
        peer: As in `cut_link`.
        namespace: As in `cut_link`.

    Raises:
        ValueError: `loss` is not between 0 and 1; `peer` is no IPv4 address.
        Unavailable: As `cut_link`.
    """
    if not 0.0 < loss < 1.0:
        raise ValueError(f"loss must be greater than 0 and less than 1, got {loss!r}")
    with _dropping(device, loss, peer, namespace):
        yield


@contextlib.contextmanager
def slow_link(device: str, rate: str, *, namespace: str | None = None) -> Iterator[None]:
    """Limits what a device sends in a block; what it receives is limited by a block for its other end.

    Args:
        device: As in `cut_link`.
        rate: In the words of tc: "400mbit".
        namespace: As in `cut_link`.

    Raises:
        ValueError: `rate` is no rate.
        Unavailable: It needs root, or tc; there is no such device, or it has a queue that somebody has chosen.
    """
    parse_rate(rate)
    try:
        shown = json.loads(_tc(namespace, "-json", "qdisc", "show", "dev", device))
        chosen = [
            queue["kind"] for queue in shown if queue.get("root") and queue["kind"] not in _DEFAULT_QUEUES
        ]
        if chosen:
            raise Unavailable(f"{device} has a queue already: {chosen[0]}")
        limit_rate(device, rate, namespace=namespace)
    except subprocess.CalledProcessError as error:
        raise Unavailable(reason_of(error)) from error
    try:
        yield
    finally:
        _forget("qdisc", device, namespace, "root")


def mend_link(device: str, *, namespace: str | None = None) -> None:
    """Removes what `cut_link`, `lossy_link` and `slow_link` have left on a device when their process was killed.

    Args:
        device: As in `cut_link`.
        namespace: As in `cut_link`.
    """
    _forget("qdisc", device, namespace, "clsact")
    _forget("qdisc", device, namespace, "root", "handle", "1:", "tbf")
    with contextlib.suppress(subprocess.CalledProcessError):
        _ip(namespace, "link", "delete", _SINK)


@contextlib.contextmanager
def _dropping(device: str, loss: float, peer: str | None, namespace: str | None) -> Iterator[None]:
    address = None
    if peer is not None:
        try:
            address = int(ipaddress.IPv4Address(peer))
        except ValueError as error:
            raise ValueError(f"peer must be an IPv4 address or None, got {peer!r}") from error
    try:
        _tc(namespace, "qdisc", "add", "dev", device, "clsact")
    except subprocess.CalledProcessError as error:
        raise Unavailable(reason_of(error)) from error
    made_sink = False
    try:
        try:
            for direction, offset in (("egress", _DESTINATION), ("ingress", _SOURCE)):
                program = _program(loss, address, offset)
                words = ["filter", "add", "dev", device, direction, "bpf", "bytecode", program, "action"]
                try:
                    _tc(namespace, *words, "drop")
                except subprocess.CalledProcessError:
                    if not made_sink:
                        _ip(namespace, "link", "add", _SINK, "type", "bridge")
                        made_sink = True
                        _ip(namespace, "link", "set", _SINK, "up")
                    _tc(namespace, *words, "mirred", "egress", "redirect", "dev", _SINK)
        except subprocess.CalledProcessError as error:
            raise Unavailable(reason_of(error)) from error
        yield
    finally:
        _forget("qdisc", device, namespace, "clsact")
        if made_sink:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(namespace, "link", "delete", _SINK)


def _program(loss: float, address: int | None, offset: int) -> str:
    """A classifier that matches packets with this probability, and only those with this address if one is given."""
    tests = []  # of which each must hold
    if address is not None:
        tests += [[(_LOAD_HALF, _TYPE), (_EQUAL, _IPV4)], [(_LOAD_WORD, offset), (_EQUAL, address)]]
    program: list[tuple[int, int, int, int]] = []
    chance = [(_LOAD_WORD, _RANDOM), (_AT_LEAST, round(loss * 2**32))] if loss < 1.0 else []
    steps = [step for test in tests for step in test] + chance
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


def _forget(what: str, device: str, namespace: str | None, *words: str) -> None:
    """Removes something that may be gone, with its device."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _tc(namespace, what, "delete", "dev", device, *words)


def _tc(namespace: str | None, *words: str) -> str:
    return run("tc", *(["-n", namespace] if namespace is not None else []), *words)


def _ip(namespace: str | None, *words: str) -> str:
    return run("ip", *(["-n", namespace] if namespace is not None else []), *words)
