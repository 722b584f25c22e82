"""Tests of memory that a host's processes share: pages and machines of any size, other builds, damaged messages."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fogdist
import pytest
import torch
import torch.distributed as dist
from fogdist import topology as topologies
from harness import World, error_of, init_process_group

from fog_pg import _C
from fog_pg._build_info import VERSION
from fog_pg._extension import load

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
# The size of a page on many kernels for ARM64 and POWER.
LARGE_PAGE = 64 * KIB
# The address space of user processes on x86-64.
ADDRESSES = 1 << 47
F_GET_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1034, 1, 2, 4


def arenas() -> dict[str, list[int]]:
    """Returns the arenas that this process has mapped, as inode -> sizes of its mappings."""
    found: dict[str, list[int]] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:fog_arena" in line:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            found.setdefault(line.split()[4], []).append(last - first)
    return found


def own_arena() -> tuple[int, int]:
    """Returns the descriptor and the address of this process's arena."""
    tensor = fogdist.empty(1)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            for number in os.listdir("/proc/self/fd"):
                try:
                    found = os.stat(f"/proc/self/fd/{number}")
                except FileNotFoundError:  # the descriptor of the listing itself
                    continue
                if str(found.st_ino) == line.split()[4] and "fog_arena" in os.readlink(
                    f"/proc/self/fd/{number}"
                ):
                    return int(number), first
    raise AssertionError("no arena")


def used_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def with_memory(fd: int, page: int) -> set[int]:
    """Returns the numbers of the pages of `page` bytes, a multiple of the system's own size, that have some memory."""
    found: set[int] = set()
    end = 0
    while True:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:  # there is no more data
            return found
        end = os.lseek(fd, begin, os.SEEK_HOLE)
        found.update(range(begin // page, (end - 1) // page + 1))


# --- a machine of 4 TiB with pages of 64 KiB ----------------------------------------------------------------


def start_on_large_machine() -> None:
    _C.emulate(page_bytes=LARGE_PAGE, memory_bytes=4 * TIB)
    init_process_group(30.0)


@pytest.fixture(scope="module")
def large_machine() -> Iterator[World]:
    world = World(4, initialize=False)
    world.run(start_on_large_machine)
    yield world
    world.close()


def windows_on_large_machine() -> None:
    fogdist.init(topologies.fully_connected)
    rank, size = fogdist.rank(), fogdist.size()
    x = fogdist.empty(100_003).fill_(float(rank))
    window = fogdist.Window(x)
    assert window.transport == "shared memory"
    assert window.transports == {other: "shared memory" for other in range(size) if other != rank}
    # Messages and windows use the same mapping: one of each rank's whole arena.
    mapped = arenas()
    assert len(mapped) == size and all(len(mappings) == 1 for mappings in mapped.values()), mapped
    assert {bytes_ for (bytes_,) in mapped.values()} == {8 * TIB}, mapped
    window.put(x)
    dist.barrier()
    assert window.update().eq(sum(range(size)) / size).all()
    window.free()
    for numel in (100, 30_000, 700_001):  # the result of the last one is in the arena too
        mean = fogdist.neighbor_allreduce(fogdist.empty(numel).fill_(float(rank)))
        torch.testing.assert_close(mean, torch.full((numel,), sum(range(size)) / size))
    assert {ino: len(mappings) for ino, mappings in arenas().items()} == dict.fromkeys(mapped, 1)


def test_all_arenas_of_a_large_machine_are_mapped_once(large_machine: World) -> None:
    """Regression: arenas were mapped twice, with 4 times the memory, and beyond 32 TiB windows used messages."""
    large_machine.run(windows_on_large_machine)


def blocks_of_large_pages() -> None:
    if my_rank() > 0:
        return
    fd, _ = own_arena()
    # Blocks of whole pages and of parts of a page, side by side, and more than the cache of blocks keeps.
    sizes = [LARGE_PAGE - 4096, LARGE_PAGE, LARGE_PAGE + 4096, 5 * LARGE_PAGE - 64, 100, 40 * MIB, 10_000]
    blocks = [
        (fogdist.empty(size, dtype=torch.uint8).fill_(place % 251), place % 251)
        for place, size in enumerate(sizes * 14)
    ]
    full, before = used_bytes(fd), with_memory(fd, mmap.PAGESIZE)
    assert full > 500 * MIB
    kept = [entry for place, entry in enumerate(blocks) if place % 14 not in (1, 2, 3, 5, 8, 9, 10, 12)]
    del blocks
    # A large page is given back as a whole or not at all, because a kernel with such pages takes the whole page.
    gone = {page * mmap.PAGESIZE // LARGE_PAGE for page in before - with_memory(fd, mmap.PAGESIZE)}
    assert len(gone) > 1000 and not gone & with_memory(fd, LARGE_PAGE)
    assert all(bool(block.eq(value).all()) for block, value in kept)
    assert full - used_bytes(fd) > 100 * MIB
    more = [fogdist.empty(size, dtype=torch.uint8).fill_(252) for size in sizes * 3]
    assert all(bool(block.eq(value).all()) for block, value in kept)
    assert all(bool(block.eq(252).all()) for block in more)


def my_rank() -> int:
    return int(os.environ["RANK"])


def test_blocks_keep_apart_where_pages_are_large(large_machine: World) -> None:
    """Regression: freeing a block gave back parts of pages, but such a kernel frees whole ones, with others' data."""
    large_machine.run(blocks_of_large_pages)


def sealed() -> None:
    fd, _ = own_arena()
    inboxes = [
        int(number)
        for number in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{number}")
        and "fog_inbox" in os.readlink(f"/proc/self/fd/{number}")
    ]
    assert inboxes
    for number in [fd, *inboxes]:
        seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
        assert fcntl.fcntl(number, F_GET_SEALS) & seals == seals
        with pytest.raises(PermissionError):
            os.ftruncate(number, 0)
        assert os.fstat(number).st_mode & 0o111 == 0


def test_nobody_can_shrink_or_execute_what_is_shared(large_machine: World) -> None:
    large_machine.run(sealed)


@pytest.mark.parametrize("memory", [16 * GIB, TIB, 24 * TIB])
@pytest.mark.parametrize("ranks", [1, 8, 192, 256])
def test_all_arenas_of_a_host_have_room(memory: int, ranks: int) -> None:
    size = _C.arena_bytes(memory, ranks, ADDRESSES)
    assert size * ranks <= ADDRESSES // 2
    # There is room for fragmentation, if there is room at all; otherwise each rank has its part.
    part = min(2 * memory, ADDRESSES // 2 // ranks)
    assert part - LARGE_PAGE < size <= part
    # RLIMIT_AS may limit addresses to this size
    assert _C.arena_bytes(memory, ranks, 8 * GIB) * ranks <= 4 * GIB


# --- ranks with little memory, two builds, damaged messages -------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    world = World(2, initialize=False)
    yield world
    if not world.broken:
        world.close()


@functools.cache
def store() -> dist.Store:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def make_group(name: str) -> Any:
    load()
    options = _C.ProcessGroupFog.Options()
    options._timeout = timedelta(seconds=20)
    options.group_name = name
    return _C.ProcessGroupFog(dist.PrefixStore(name, store()), my_rank(), 2, options)


def another_build() -> str:
    load()
    if my_rank() == 1:
        _C.emulate(protocol="fog 0.0 (protocol 0), torch 2.13.0")
    with pytest.raises(dist.DistBackendError) as failure:
        make_group("two builds")
    _C.emulate()
    return str(failure.value)


def test_two_builds_in_one_job_are_an_error_on_all_ranks(pair: World) -> None:
    for message in pair.run(another_build):
        load()  # tells the extension its version
        assert f"rank 0 has {_C.protocol()}; rank 1 has fog 0.0 (protocol 0), torch 2.13.0." in message
        assert (
            _C.protocol().startswith(f"fog {VERSION} (")
            and f", torch {torch.__version__.partition('+')[0]}" in _C.protocol()
        )


def little_memory() -> None:
    if my_rank() == 1:
        _C.emulate(memory_bytes=64 * MIB)  # twice as many bytes of addresses
    group = make_group("little memory")
    if my_rank() == 1:
        blocks = [fogdist.empty(MIB, dtype=torch.uint8).fill_(1) for _ in range(100)]
        assert all(_C.is_shared(block) for block in blocks)
        del blocks[::2]
        assert not _C.is_shared(fogdist.empty(100 * MIB, dtype=torch.uint8))
        del blocks
        for mib in range(10, 110, 10):  # freed blocks are joined
            assert _C.is_shared(fogdist.empty(mib * MIB, dtype=torch.uint8).fill_(2)), mib
        filled = fogdist.empty(110 * MIB, dtype=torch.uint8)
        assert _C.is_shared(filled)
    other = 1 - my_rank()
    numbers = torch.arange(8 * MIB, dtype=torch.float32)
    x = numbers + my_rank()
    window = group.create_window(x, "w", [other], [other])
    # Rank 1 has no memory to share, so rank 0 reaches it by messages.
    assert (
        window.transport == window.transport_to(other) == ("messages" if my_rank() == 0 else "shared memory")
    )
    window.put(x, [(other, 1.0)]).wait()
    group.barrier().wait()
    assert window.update(0.0, [(other, 1.0)], clone=True).equal(numbers + other)
    window.get([(other, 1.0)]).wait()
    assert window.update(0.0, [(other, 1.0)], clone=True).equal(numbers + other)
    window.free()


def test_transport_tells_which_neighbors_are_reached_by_messages(pair: World) -> None:
    pair.run(little_memory)


class Header(ctypes.Structure):
    """The header in csrc/process_group_fog/transport/message.hpp, with what it says of failures and windows."""

    _fields_ = [
        ("kind", ctypes.c_uint8),
        ("delivery", ctypes.c_uint8),
        ("wants_confirm", ctypes.c_uint8),
        ("payload_tag", ctypes.c_uint32),
        ("group", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("scale", ctypes.c_double),
        ("failed_rank", ctypes.c_int32),
        ("of_window", ctypes.c_char * 36),
        ("window_op", ctypes.c_uint16),
        ("of_operation", ctypes.c_char * 102),
        ("of_transfer", ctypes.c_char * 20),
        ("chunk", ctypes.c_uint32),
    ]


class RingTo:
    """This process's ring in the inbox of another one, as in csrc/process_group_fog/transport/shared_memory."""

    CAPACITY = 256 * KIB
    WRITTEN, READ, DATA = 64, 128, 192
    SLOT_BYTES = DATA + CAPACITY

    def __init__(self, writer: int) -> None:
        page = mmap.PAGESIZE
        self.slot = -(-(128 + 8 * 8192) // page) * page + writer * self.SLOT_BYTES
        for number in os.listdir("/proc/self/fd"):
            name = f"/proc/self/fd/{number}"
            if os.path.lexists(name) and "fog_inbox" in os.readlink(name):
                self.memory = mmap.mmap(int(number), os.fstat(int(number)).st_size)
                if self.word(self.WRITTEN) > 0:  # a process never writes to its own inbox
                    return
        raise AssertionError(f"rank {writer} has written to no inbox")

    def word(self, offset: int) -> int:
        return struct.unpack_from("<Q", self.memory, self.slot + offset)[0]

    def last_record(self) -> bytes:
        """Returns the last record; the records must not have wrapped around."""
        position = 0
        while True:
            (length,) = struct.unpack_from("<Q", self.memory, self.slot + self.DATA + position)
            following = position + (8 + length + 7) // 8 * 8
            if following == self.word(self.WRITTEN):
                first = self.slot + self.DATA + position + 8
                return self.memory[first : first + length]
            position = following

    def write(self, record: bytes, length: int | None = None) -> None:
        written = self.word(self.WRITTEN)
        assert written + 8 + len(record) < self.CAPACITY, "the ring wraps around"
        first = self.slot + self.DATA + written
        struct.pack_into("<Q", self.memory, first, len(record) if length is None else length)
        self.memory[first + 8 : first + 8 + len(record)] = record
        struct.pack_into(
            "<Q", self.memory, self.slot + self.WRITTEN, written + (8 + len(record) + 7) // 8 * 8
        )


# Damages of a message, with the receiver's description of each. Kinds and deliveries are numbers of message.hpp.
DAMAGED: list[tuple[dict[str, int], str]] = [
    ({"bytes": 1 << 20}, "its data has another length"),
    ({"bytes": 0}, "its data has another length"),
    ({"bytes": 1 << 60}, "no data is so long"),
    ({"kind": 99}, "there is no such kind"),
    ({"delivery": 77}, "its data cannot come so"),
    ({"delivery": 2}, "it carries data"),
    ({"delivery": 3}, "only other hosts send this"),
    ({"delivery": 4}, "it carries data"),
    ({"delivery": 5}, "its data cannot come so"),
    ({"kind": 5, "chunk": 5000}, "its sender has no such chunk"),
    ({"kind": 7, "delivery": 1}, "its text is not all there"),
    ({"kind": 11, "window_op": 8}, "there is no such operation on a window"),
    ({"kind": 5}, "it carries data"),
    ({"kind": 20, "bytes": 0}, "its data has another length"),
    ({"kind": 21}, "it is no part of a message"),
    ({"kind": 21, "delivery": 1}, "it is no part of a message"),
]
# The news of a failure, whose text was cut within a character, and has a byte that is no text.
NEWS, CUT, REPORTED = {"kind": 7, "failed_rank": 1}, b"\xc3b\xe2\x82", r"rank 1 reports: \?b\?\?"


def write_to_inbox(name: str, write: Callable[[RingTo], None]) -> str:
    """Rank 1 writes into rank 0's inbox after a message, in a group of its own; returns what a receive there raises."""
    group, tensor, error = make_group(name), torch.ones(1), ""
    if my_rank() == 0:
        group.recv([tensor], 1, 0).wait()
        store().set(f"{name} received", "")
        store().wait([f"{name} written"])
        error = error_of(lambda: group.recv([tensor], 1, 0).wait(timedelta(seconds=1)))
    else:
        group.send([tensor], 0, 0).wait()
        store().wait([f"{name} received"])
        write(RingTo(1))
        store().set(f"{name} written", "")
    store().set(f"{name} done {my_rank()}", "")
    store().wait([f"{name} done {rank}" for rank in range(2)])
    return error


def damaged_messages() -> list[str]:
    """Returns the error of each damage of a message, and of messages that are too short."""

    def damaged(ring: RingTo, fields: dict[str, int]) -> bytes:
        record = bytearray(ring.last_record())
        header = Header.from_buffer(record)
        assert (header.kind, header.delivery, header.bytes) == (2, 0, 4)
        for field, value in fields.items():
            setattr(header, field, value)
        del header
        return bytes(record)

    writes: list[Callable[[RingTo], None]] = [
        lambda ring, fields=fields: ring.write(damaged(ring, fields)) for fields, _ in DAMAGED
    ]
    writes.append(lambda ring: ring.write(damaged(ring, NEWS)[:-4] + CUT))
    writes += [lambda ring, n=length: ring.write(b"12345678", n) for length in (None, 1 << 40)]
    return [write_to_inbox(f"damaged {number}", write) for number, write in enumerate(writes)]


def test_a_damaged_message_is_an_error_that_names_its_sender(new_world: Callable[..., World]) -> None:
    errors, _ = new_world(2, initialize=False).run(damaged_messages)  # whose rings have not wrapped around
    assert re.search(REPORTED, errors.pop(len(DAMAGED)))
    expected = [text for _, text in DAMAGED] + ["it is shorter than a header"] * 2
    for error, text in zip(errors, expected, strict=True):
        assert re.search(
            rf"rank 1 of the world sent \d+ bytes that are not a message of fog: {text}", error
        ), error


# --- the end ------------------------------------------------------------------------------------------------


def used_rings() -> int:
    """Returns how many rings of the mapped inboxes were ever written to."""
    page, ranks, found = mmap.PAGESIZE, int(os.environ["WORLD_SIZE"]), 0
    first = -(-(128 + 8 * 8192) // page) * page
    for number in os.listdir("/proc/self/fd"):
        name = f"/proc/self/fd/{number}"
        if os.path.lexists(name) and "fog_inbox" in os.readlink(name):
            memory = mmap.mmap(int(number), os.fstat(int(number)).st_size)
            for writer in range(ranks):
                place = first + writer * RingTo.SLOT_BYTES + RingTo.WRITTEN
                found += struct.unpack_from("<Q", memory, place)[0] > 0
            memory.close()
    return found


def leave_first(count: Callable[[], int]) -> tuple[int, int]:
    """Rank 0 sends to rank 1 and leaves; returns counts of before and after it leaves."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def meet(name: str) -> None:
        store.set(f"{name}/{rank}", "1")
        store.wait([f"{name}/{each}" for each in range(dist.get_world_size())])

    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(torch.ones(4), 1 - rank)
    meet("sent")
    between = count()
    meet("counted")
    if rank == 0:
        _C.shutdown()
        store.set("gone", "1")
    store.wait(["gone"])
    return between, count()


def test_who_ends_says_nothing_to_whom_it_never_spoke_with(new_world: Callable[..., World]) -> None:
    for between, after in new_world(4, finalizing=0).run(leave_first, used_rings):
        # The ring from rank 0 to rank 1 is the only one, also for the goodbye.
        assert between == after == 1, (between, after)
