"""Runs the programs of `fog_cli.programs` on this host, alone or as ranks of `fog run`, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fog_cli import launchers
from fog_cli.processes import describe


@dataclass(frozen=True)
class Ended:
    """The result of a program.

    Attributes:
        status: Its exit status, or the negative number of the signal that ended it; None if it exceeded its time.
        output: Its standard output.
        errors: Its output on standard error.
    """

    status: int | None
    output: str
    errors: str

    def objects(self, rank: int = 0) -> list[dict[str, Any]]:
        """Returns the lines of a rank, or of a program that is no rank, that are JSON objects. Libraries may print others."""
        found = []
        for line in re.findall(rf"^(?:\[{rank}\] )?(\{{.*\}})$", self.output, re.MULTILINE):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def why(self) -> str:
        """Returns the reason for a failure as text; "" if the program succeeded."""
        if self.status == 0:
            return ""
        if self.status is None:
            return "it did not end in time and was killed"
        last = self.errors.strip().splitlines()[-1:]
        return ": ".join([f"it ended {describe(self.status)}", *last])


def run_program(
    name: str,
    words: Sequence[str] = (),
    *,
    limit: float,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Runs one program of `fog_cli.programs`.

    Args:
        name: The name of its module.
        words: Its arguments.
        limit: The time limit in seconds.
        ranks: The number of ranks; None to run it as no rank.
        variables: Additional environment variables.
    """
    command = ["-m", f"fog_cli.programs.{name}", *words]
    if ranks is not None:
        command = ["-m", "fog_cli", "run", "-np", str(ranks), *command]
    # Output goes to files, because a pipe that a left-over process keeps open would block this process.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = subprocess.run(
                [sys.executable, *command],
                env=launchers.without_ranks(os.environ) | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                timeout=limit,
                check=False,
            ).returncode
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(status, *texts)
