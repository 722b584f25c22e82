"""Checks the C++ files: each layer includes only interfaces of layers below it; no file is long; addresses are clear."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.style

SOURCES = Path(__file__).resolve().parent.parent / "csrc" / "process_group_fog"
# The address of a method, as bindings take it.
ADDRESS = re.compile(r"&(\w+)::(\w+)[,)]")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
MOST_LINES = 900

# From bottom to top: the folders that each folder may include besides its own files.
ALLOWED = {
    "core": set(),
    "job": {"core"},
    "transport": {"core"},
    "transport/shared_memory": {"core", "transport"},
    "transport/mpi": {"core", "job", "transport"},
    "transport/tcp": {"core", "job", "transport"},
    "engine": {"core", "job", "transport"},
    "collectives": {"core", "transport", "engine"},
    "windows": {"core", "transport", "engine"},
    "device": {"core", "transport", "engine", "windows"},
    "backend": {"core", "job", "transport", "engine", "collectives", "windows", "device"},
    "testing": {"core", "job", "transport", "engine", "collectives", "windows", "device", "backend"},
}
# Files that may include more than their folder, each with the reason.
MORE = {
    # It contains all ways between processes, and chooses one of them for each peer.
    "transport/process_transport": {"job", "transport/shared_memory", "transport/mpi", "transport/tcp"},
    # The largest number of a chunk.
    "transport/message": {"transport/shared_memory"},
    # It joins a job and makes the engine of that job.
    "engine/process_engine": {"transport/shared_memory", "transport/tcp"},
    # It makes the parts of the transport, whose addresses the ranks tell each other.
    "engine/group_setup": {"transport/shared_memory", "transport/tcp"},
    # A process that joins makes its links and connections before it has a transport.
    "engine/joining": {"transport/shared_memory", "transport/tcp"},
    # The memory of operations is in the arena.
    "engine/operation": {"transport/shared_memory"},
    # Other processes read it as an anonymous file.
    "engine/flight_record": {"transport/shared_memory"},
    # Received parts are in the arena.
    "transport/tcp/channel": {"transport/shared_memory"},
    # The pool for RMA is a block of the arena, so that neighbors on the host can map it too; copies are there as well.
    "transport/mpi/remote_memory": {"transport/shared_memory"},
    # Headers, and data for which there are no slots, go by the wire.
    "transport/mpi/notified_puts": {"transport/shared_memory", "transport/tcp"},
    # Windows on one host are memory that neighbors map.
    "windows": {"transport/shared_memory"},
    # Windows put and get by RMA themselves, without the engine.
    "windows/remote_leg": {"transport/mpi"},
    "windows/window_pool": {"transport/mpi"},
    # Tensors of lists and results are in the arena.
    "backend": {"transport/shared_memory"},
    # Worlds of virtual ranks have each way between ranks that needs no MPI.
    "testing": {"transport/shared_memory", "transport/tcp"},
}


def folder_of(file: str) -> str:
    """Returns the longest folder of the table that contains the file."""
    return max((folder for folder in ALLOWED if file.startswith(f"{folder}/")), key=len, default="")


def sources() -> list[str]:
    return sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.?pp"))


def test_every_file_is_in_a_layer() -> None:
    assert [file for file in sources() if not folder_of(file)] == []


def test_includes_go_down_only() -> None:
    wrong = []
    for file in sources():
        folder = folder_of(file)
        name = file.rsplit(".", 1)[0]
        allowed = ALLOWED[folder] | {folder} | MORE.get(name, set()) | MORE.get(folder, set())
        for included in INCLUDE.findall((SOURCES / file).read_text()):
            if not (SOURCES / included).exists():
                wrong.append(f"{file}: {included} is not written from {SOURCES.name}")
            elif folder_of(included) not in allowed:
                wrong.append(f"{file}: {included}")
    assert wrong == []


def test_the_table_names_nothing_that_is_not_there() -> None:
    used = {folder_of(file) for file in sources()}
    assert used == set(ALLOWED)
    names = {file.rsplit(".", 1)[0] for file in sources()} | used
    assert set(MORE) <= names


def test_no_file_is_long() -> None:
    long = {file: len((SOURCES / file).read_text().splitlines()) for file in sources()}
    assert {file: lines for file, lines in long.items() if lines > MOST_LINES} == {}


def test_a_method_whose_address_is_taken_has_one_declaration() -> None:
    """A second one that is compiled for other versions of torch only would make the address ambiguous there."""
    texts = {file: (SOURCES / file).read_text() for file in sources()}
    classes = [
        found
        for file, text in texts.items()
        if file.endswith(".hpp")
        for found in re.findall(r"^class (\w+)[^;\n]*\{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL)
    ]
    taken = {address for text in texts.values() for address in ADDRESS.findall(text)}
    counts = {
        (name, method): len(re.findall(rf"^  \w[^(\n]* [&*]?{method}\(", body, re.MULTILINE))
        for name, body in classes
        for method in {method for kind, method in taken if kind == name}
    }
    assert counts["ProcessGroupFog", "hosts"] == 1
    assert {address: count for address, count in counts.items() if count > 1} == {}
