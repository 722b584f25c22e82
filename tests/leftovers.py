"""What ranks leave behind when they end: processes, and names in /dev/shm.

``isolate`` gives the tests a /dev/shm of their own, so that nothing in it is another program's. It takes a mount namespace:
root may make one, others may in a user namespace, unless the system forbids these. Where it cannot be had, every new entry
of this user counts that no living process uses; a program that dies meanwhile, beside the tests, may then be blamed on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from pathlib import Path

DIRECTORY = Path("/dev/shm")
# How long the system may take to remove what ended ranks held.
SETTLE_SECONDS = 5.0
# What the CUDA driver and NCCL have in /dev/shm: a process that is killed cannot remove its own, whatever fog does.
_OF_OTHER_LIBRARIES = ("cuda.shm.", "nccl-")

# Of <sched.h> and <sys/mount.h>.
_CLONE_NEWNS = 0x20000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_SLAVE = 0x2, 0x4, 0x4000, 0x80000

# Every rank leads a session of its own, so whatever it starts can be found by these numbers when it is gone.
_sessions: set[int] = set()
# The directory that other programs have; None as long as it is this one.
_of_others: int | None = None


def isolate() -> bool:
    """Gives this process, and all that it starts from now on, a /dev/shm of its own; False where that is not allowed.

    Call it before there are threads: they would keep the old one.
    """
    global _of_others
    if _of_others is not None:
        return True
    if not DIRECTORY.is_dir():
        return False
    outside = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    size = os.fstatvfs(outside)
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        entered = libc.unshare(_CLONE_NEWNS) == 0
    else:
        entered = _may_mount_in_a_user_namespace(libc) and _enter_user_namespace(libc)
    # Mounts from outside still come in; those of the tests stay in.
    if (
        not entered
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
    """A descriptor of the /dev/shm that other programs have, after ``isolate``; None if it is the same one."""
    return _of_others


def _enter_user_namespace(libc: ctypes.CDLL) -> bool:
    """With this user's own number, so that all looks as before."""
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _may_mount_in_a_user_namespace(libc: ctypes.CDLL) -> bool:
    """Tried by a child: some systems let one enter a user namespace and allow nothing there."""
    child = os.fork()
    if child == 0:
        allowed = False
        with contextlib.suppress(BaseException):
            allowed = _enter_user_namespace(libc) and (
                libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None) == 0
            )
        os._exit(0 if allowed else 1)
    return os.waitpid(child, 0)[1] == 0


def watch(session: int) -> None:
    """Adds a rank, which leads this session, to those whose processes are looked for."""
    _sessions.add(session)


def leftover_processes() -> dict[int, str]:
    """Processes that ranks left behind: process id -> command line."""
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
    """Names of this user's entries in /dev/shm, without those that libraries of GPUs make."""
    if not DIRECTORY.exists():
        return set()
    return {
        entry.name
        for entry in DIRECTORY.iterdir()
        if not entry.name.startswith(_OF_OTHER_LIBRARIES) and _owned(entry)
    }


def in_use(names: set[str]) -> set[str]:
    """Those of ``names`` in /dev/shm that a living process has mapped or open: they are not left behind."""
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
            pass  # another user's, or it ended meanwhile
        used |= {name for name in names if any(f"/dev/shm/{name}" in text for text in held)}
    return used


def left_behind(before: set[str], worlds_run: bool = False, settle: float = SETTLE_SECONDS) -> str:
    """What ranks have left, in words; empty if it is nothing.

    Args:
        before: The entries of /dev/shm that were there.
        worlds_run: Ranks of worlds may still be there.
        settle: How long to wait for the system to remove what ended ranks held, in seconds.
    """
    deadline = time.monotonic() + settle
    while True:
        processes = {} if worlds_run else leftover_processes()
        entries = shared_memory_entries() - before
        if entries:
            entries -= in_use(entries)
        if not processes and not entries:
            if not worlds_run:
                _sessions.clear()  # others may get their numbers from now on
            return ""
        if time.monotonic() > deadline:
            return f"left behind by ranks: processes {processes}, /dev/shm entries {sorted(entries)}"
        time.sleep(0.1)


def _owned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False
