"""Finds processes and names in /dev/shm that ranks leave behind when they end.

``isolate`` gives the tests their own /dev/shm, so it has no entries of other programs. This needs a mount namespace, which
root may make. If it is not possible, every new entry of this user counts that no living process uses; the tests may then
be blamed for another program that dies meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

DIRECTORY = Path("/dev/shm")
# Seconds in which the system removes resources of ended ranks.
SETTLE_SECONDS = 5.0
# Entries of the CUDA driver and NCCL in /dev/shm: a killed process cannot remove its own, whatever fog does.
_OF_OTHER_LIBRARIES = ("cuda.shm.", "nccl-")

# Constants of <sched.h> and <sys/mount.h>.
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x4000, 0x80000

# Every rank leads its own session, so all processes that it started can be found by its number after its end.
_sessions: set[int] = set()
# The /dev/shm of other programs; None if it is the same as this process's.
_of_others: int | None = None


def isolate() -> bool:
    """Gives this process and its future children their own /dev/shm; returns False if that is not allowed.

    This must be called before threads start, because they would keep the old one.
    """
    global _of_others
    if _of_others is not None:
        return True
    if not DIRECTORY.is_dir():
        return False
    outside = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    size = os.fstatvfs(outside)
    libc = ctypes.CDLL(None, use_errno=True)
    # Mounts from outside are still visible inside, but not those of the tests outside.
    if (
        libc.unshare(_CLONE_NEWNS) != 0
        or libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) != 0
        or libc.mount(
            b"tmpfs",
            os.fsencode(DIRECTORY),
            b"tmpfs",
            ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
            f"mode=1777,size={size.f_blocks * size.f_frsize}".encode(),
        )
        != 0
    ):
        os.close(outside)
        return False
    _of_others = outside
    return True


def directory_of_others() -> int | None:
    """Returns a descriptor of the /dev/shm of other programs, after ``isolate``; None if it is the same one."""
    return _of_others


def watch(session: int) -> None:
    """Adds the session of a rank, whose processes will be looked for."""
    _sessions.add(session)


def leftover_processes() -> dict[int, str]:
    """Returns processes that ranks left behind, as process id -> command line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z" and int(fields[3]) in _sessions:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue  # it ended meanwhile
    return found


def shared_memory_entries() -> set[str]:
    """Returns the names of this user's entries in /dev/shm, without those of GPU libraries."""
    if not DIRECTORY.exists():
        return set()
    return {
        entry.name
        for entry in DIRECTORY.iterdir()
        if not entry.name.startswith(_OF_OTHER_LIBRARIES) and _owned(entry)
    }


def in_use(names: set[str]) -> set[str]:
    """Returns those of ``names`` in /dev/shm that a living process has mapped or open, so they are not left behind."""
    used = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        held = []
        try:
            held.append((entry / "maps").read_text())
            for link in (entry / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    held.append(os.readlink(link))
        except OSError:
            pass  # another user's process, or it ended meanwhile
        used |= {name for name in names if any(f"/dev/shm/{name}" in text for text in held)}
    return used


def left_behind(before: set[str], worlds_run: bool = False, settle: float = SETTLE_SECONDS) -> str:
    """Returns a description of what ranks have left behind; empty if there is nothing.

    Args:
        before: The entries of /dev/shm from before.
        worlds_run: Whether ranks of worlds may still run.
        settle: Seconds to wait until the system has removed resources of ended ranks.
    """
    deadline = time.monotonic() + settle
    while True:
        processes = {} if worlds_run else leftover_processes()
        entries = shared_memory_entries() - before
        if entries:
            entries -= in_use(entries)
        if not processes and not entries:
            if not worlds_run:
                _sessions.clear()  # from now on, others may get these numbers
            return ""
        if time.monotonic() > deadline:
            return f"left behind by ranks: processes {processes}, /dev/shm entries {sorted(entries)}"
        time.sleep(0.1)


def _owned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False
