"""Runs programs of the system, such as ip, tc and mount."""

from __future__ import annotations

import subprocess


class Unavailable(Exception):
    """This machine, or this user, cannot do what was asked for; says why."""


def run(*words: str) -> str:
    """Runs a program and returns what it printed.

    Raises:
        Unavailable: There is no such program.
        subprocess.CalledProcessError: It failed.
    """
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=10).stdout
    except FileNotFoundError as error:
        raise Unavailable(f"needs the program {words[0]}") from error


def reason_of(error: subprocess.CalledProcessError) -> str:
    """The command that failed and what it printed, in one line."""
    return f"{' '.join(error.cmd)}: {' '.join(error.stderr.split())}"
