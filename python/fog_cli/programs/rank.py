"""Runs a rank's command and prefixes each line of its output with the rank.

`python -m fog_cli.programs.rank COMMAND`. It starts a second process that reads both output streams,
and then replaces itself with the command, so that the launcher sees the process ID, the exit status and the signals of
the command itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import os
import selectors
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

# The exit status of a rank that has lost another one, see `fog_pg._last_words`.
STATUS_OF_VICTIM = 75
# The value in <sys/prctl.h>.
_PR_SET_PDEATHSIG = 1
_MOST_READ = 1 << 16
# A line is buffered until it ends, but only up to this number of bytes.
_LONGEST = 1 << 20


def die_with_parent() -> None:
    """Makes the system send SIGTERM to this process, also after it has called exec, when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the call of prctl
        os.kill(os.getpid(), signal.SIGTERM)


class LinePrefixer:
    """Splits data into whole lines and prefixes them. A carriage return ends a line too, as in progress bars."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = ""
        # It takes texts, so bytes are taken for Latin 1, which has a character for each of them.
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)

    def lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes. Empty `data` marks the end and returns the rest."""
        text = self._newlines.decode(data.decode("latin-1"), final=not data)
        *whole, self._rest = (self._rest + text).split("\n")
        if self._rest and (not data or len(self._rest) > _LONGEST):
            whole.append(self._rest)
            self._rest = ""
        return [self._prefix + line.encode("latin-1") + b"\n" for line in whole]


def copy_lines(streams: Mapping[int, int], prefix: bytes) -> None:
    """Copies each stream, from descriptor to descriptor, until all end."""
    selector = selectors.DefaultSelector()
    prefixers = {source: LinePrefixer(prefix) for source in streams}
    for source in streams:
        selector.register(source, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            source = key.fd
            data = os.read(source, _MOST_READ)
            if not data:
                selector.unregister(source)
            if lines := prefixers[source].lines(data):
                write_whole(streams[source], b"".join(lines))


def write_whole(descriptor: int, data: bytes) -> None:
    """Writes all data under a lock: ranks share a pipe, and only short writes to a pipe are atomic."""
    locked = False
    with contextlib.suppress(OSError):  # a descriptor that cannot be locked is not shared
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        locked = True
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return  # the reader has closed the pipe; the rank continues
    finally:
        if locked:
            fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _start_copying(prefix: bytes) -> None:
    """Replaces both output streams by pipes, and starts a process to read them that is no child of this process."""
    pipes = {1: os.pipe(), 2: os.pipe()}
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.setsid()  # launchers kill the process group of a rank
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(
                    number, signal.SIG_IGN
                )  # the signals are for the rank; its last output must still be copied
            for _, writer in pipes.values():
                os.close(writer)
            with contextlib.suppress(BaseException):
                copy_lines({reader: stream for stream, (reader, _) in pipes.items()}, prefix)
        os._exit(0)
    os.waitpid(child, 0)
    for stream, (reader, writer) in pipes.items():
        os.dup2(writer, stream)
        os.close(reader)
        os.close(writer)


def main() -> NoReturn:
    """Runs the command of the command line."""
    die_with_parent()
    words = sys.argv[1:]
    _start_copying(f"[{os.environ['RANK']}] ".encode())
    os.environ.setdefault("FOG_RUN", "1")
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # which is for `fog_cli.one_host` only
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"fog run: {words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
