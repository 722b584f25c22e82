"""Jobs on eight emulated hosts whose network is cut in two for a while: one side goes on, the others can join again.

`make partitions` has more cuts, and longer ones (tests/partitions.py).
"""

from __future__ import annotations

from pathlib import Path

import partitions
import pytest
from partitions import HOST_TIMEOUT, HOSTS, KINDS, Cut

LONG = HOST_TIMEOUT + 1.0
ALWAYS = [
    Cut("DecentralizedSGD", 4, "both", LONG),
    Cut("AsynchronousGossip", 3, "received", LONG),
    # Longer than half of the time, and nobody is lost.
    Cut("DecentralizedSGD/patience", 5, "both", 7.0, 11),
]
MORE = [*partitions.cuts(KINDS, (LONG,), (7, 1), ("both", "sent", "received"))]
MORE += [each for each in partitions.cuts(KINDS, (LONG,), (4,), ("pair",)) if each not in ALWAYS]


@pytest.mark.parametrize(
    "cut", [*ALWAYS, *(pytest.param(each, marks=pytest.mark.long) for each in MORE)], ids=str
)
def test_a_network_that_is_cut(tmp_path: Path, cut: Cut) -> None:
    outcome = partitions.run(cut, tmp_path)
    assert outcome.problems == []
    if cut.way == "both" and not cut.is_short:
        first = range(cut.first)
        assert outcome.go_on == [*(first if 2 * cut.first >= HOSTS else range(cut.first, HOSTS))]
