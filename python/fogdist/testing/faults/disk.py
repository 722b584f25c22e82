"""Faults of a disk: it is full, or files may not grow."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

from fogdist.testing.faults.commands import Unavailable, reason_of, run
from fogdist.testing.faults.processes import process_id


@contextlib.contextmanager
def full_disk(folder: str | os.PathLike[str], free: int = 0) -> Iterator[None]:
    """Makes a folder a small disk of its own in a block; writing more than fits raises OSError (ENOSPC).

    The disk is a tmpfs, and what was written to it is gone after the block. Needs root. A process that is killed in the
    block leaves the mount behind (`umount FOLDER`).

    Args:
        folder: An empty folder.
        free: Bytes that can be written, rounded up to whole pages, and at least one page.

    Raises:
        NotADirectoryError: It is no folder.
        ValueError: It is not empty; `free` is negative.
        Unavailable: It cannot be mounted here.
    """
    path = Path(folder)
    check_bytes(free, "free")
    if not path.is_dir():
        raise NotADirectoryError(f"folder must be an empty folder, got {path}")
    if any(path.iterdir()):
        raise ValueError(f"folder must be empty, got {path}, which has files")
    page = resource.getpagesize()
    size = max(page, -(-free // page) * page)
    options = f"size={size},mode={path.stat().st_mode & 0o7777:o}"
    try:
        run("mount", "-t", "tmpfs", "-o", options, "fogdist-full-disk", str(path))
    except subprocess.CalledProcessError as error:
        raise Unavailable(reason_of(error)) from error
    try:
        yield
    finally:
        run("umount", "--lazy", str(path))  # lazy: a file in it may still be open


@contextlib.contextmanager
def file_limit(size: int, pid: int | None = None) -> Iterator[None]:
    """Lets a process write no file beyond a size in a block; Python then raises OSError (EFBIG). Needs no root.

    The limit is the system's (RLIMIT_FSIZE) and counts for shared memory too, so what grows beyond it fails as well. A
    program that does not ignore SIGXFSZ, as Python does, is ended by it.

    Args:
        size: Bytes.
        pid: The process; by default this one.

    Raises:
        ProcessLookupError: There is no such process.
        PermissionError: The process is another user's.
        TypeError: An argument has a wrong type.
        ValueError: `size` is negative; `pid` is no number of a single process.
    """
    check_bytes(size, "size")
    number = process_id(pid)
    soft, hard = resource.prlimit(number, resource.RLIMIT_FSIZE)
    if hard != resource.RLIM_INFINITY and size > hard:
        raise ValueError(f"size must be at most the system's limit of {hard}, got {size}")
    resource.prlimit(number, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(number, resource.RLIMIT_FSIZE, (soft, hard))


def check_bytes(number: int, argument: str) -> None:
    """Checks a number of bytes."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{argument} must be an int, got {type(number).__name__}")
    if number < 0:
        raise ValueError(f"{argument} must not be negative, got {number}")
