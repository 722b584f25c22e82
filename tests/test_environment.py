"""Checks that the module, the documentation and the code agree on environment variables; values, errors, the log."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from scripts import ROOT

from fog_pg import _logging, environment
from fog_pg.environment import VARIABLES, Variable

PYTHON = [*ROOT.glob("fog_pg/*.py"), *ROOT.glob("python/fogdist/**/*.py")]
# The command line works without fog_pg, whose import imports torch.
COMMAND_LINE = list(ROOT.glob("python/fog_cli/**/*.py"))
CPP = [
    path for path in ROOT.glob("csrc/**/*.[ch]pp") if re.search(r"getenv\(|whole_seconds\(", path.read_text())
]
TABLE = (ROOT / "docs" / "environment.md").read_text()

# Names that the C++ code sets or removes for the start of MPI, and does not read.
SET_FOR_MPI = {
    "MPIR_CVAR_PMI_VERSION",
    "PMIX_NAMESPACE",
    "PMIX_SERVER_URI2",
    "PMIX_SERVER_URI3",
    "PMI_ID",
    "PMI_PORT",
}


def listed(reader: str) -> set[str]:
    return {variable.name for variable in VARIABLES if reader in variable.reader}


def default_of(variable: Variable[object]) -> str:
    value = variable.default
    if value in ("", -1) or (value == 0 and variable.kind is not environment.FLAG):
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def row(variable: Variable[object]) -> str:
    """Returns a variable's row in the documentation's table."""
    default = f"`{shown}`" if (shown := default_of(variable)) else ""
    if variable.owner != "fog":
        return f"| `{variable.name}` | {variable.owner} | {variable.meaning} |"
    when = "build" if variable.reader == "build" else "run"
    return f"| `{variable.name}` | {when} | {variable.kind.name} | {default} | {variable.meaning} |"


def test_documentation_has_each_variable_as_the_module_has_it() -> None:
    wanted = [row(variable) for variable in VARIABLES if variable.owner != "tests"]
    assert [line for line in TABLE.splitlines() if line.startswith("| `")] == wanted, "\n".join(wanted)


def test_python_reads_what_is_listed_and_through_the_module_only() -> None:
    read = set()
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "environment":
                variable = getattr(environment, node.attr, None)
                if isinstance(variable, Variable):
                    read.add(variable.name)
        if path.name == "environment.py" or path.parts[-2:] == ("common", "util.py"):
            continue  # the second one sets variables that its caller names
        reads = [
            node.lineno
            for node in ast.walk(tree)
            if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ.get", "os.getenv"))
            or (
                ast.unparse(node).startswith("os.environ[")
                and isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
            )
            or (isinstance(node, ast.Compare) and "os.environ" in map(ast.unparse, node.comparators))
        ]
        assert not reads, f"{path.relative_to(ROOT)} reads os.environ in lines {reads}"
    assert read == listed("Python")


def test_command_line_reads_what_is_listed() -> None:
    text = "\n".join(path.read_text() for path in COMMAND_LINE)
    read = set(re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"', text))
    read |= set(re.findall(r'"([A-Z_]+)" in environ', text))
    read -= {"PATH", "PYTHONPATH"}
    assert {"RANK", "SLURM_JOB_ID"} < read <= {variable.name for variable in VARIABLES}
    assert listed("fog run") <= read


def test_cpp_reads_what_is_listed() -> None:
    names = {
        name
        for path in CPP
        for name in re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])"', path.read_text())
        if not name.startswith("MPI_THREAD_")
    }
    assert names - SET_FOR_MPI == listed("C++")


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (r"kHostTimeout = (\d+);", environment.HOST_TIMEOUT.default),
        (r"kDefault = size_t\((\d+)\) << 20;", environment.RMA_BYTES.default >> 20),
    ],
)
def test_defaults_are_those_of_the_cpp_code(pattern: str, value: int) -> None:
    (found,) = {number for path in CPP for number in re.findall(pattern, path.read_text())}
    assert int(found) == value


def test_build_reads_what_is_listed() -> None:
    text = (ROOT / "setup.py").read_text()
    assert {name for name in listed("build") if name not in text} == set()
    read = set(re.findall(r"""environ(?:\.get\(|\[)["'](\w+)|"(\w+)" in os.environ""", text))
    assert {first or second for first, second in read} <= listed("build")


def test_values() -> None:
    def value(variable: Variable[object], text: str) -> object:
        return variable.get({variable.name: text})

    assert value(environment.CONFIRM, "1") is True and value(environment.LOCAL_LINKS, "0") is False
    assert value(environment.HOST_TIMEOUT, "4") == 4 and value(environment.BETWEEN_HOSTS, "rma") == "rma"
    assert value(environment.INTERFACE, "eth0") == "eth0"
    for variable in VARIABLES:
        assert variable.get({}) == value(variable, "") == variable.default


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("FOG_RUN", "yes", "0 and 1"),
        ("FOG_BETWEEN_HOSTS", "RMA", "auto, tcp and rma (tcp has replaced MPI's messages)"),
        ("FOG_RMA_BYTES", "16M", "whole bytes from 1048576 on"),
        ("FOG_RMA_BYTES", "1024", "whole bytes from 1048576 on"),
        ("FOG_HOST_TIMEOUT", "3", "whole seconds from 4 to 32767"),
        ("FOG_HOST_TIMEOUT", "\u0664", "whole seconds from 4 to 32767"),  # a digit that C++ does not accept
        ("FOG_LOG_LEVEL", "loud", "debug, info, warning and error"),
    ],
)
def test_wrong_values(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        environment.check({name: text})
    assert str(caught.value) == f"{name}: got '{text}'; allowed are {allowed}"


# --- the log ------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the loggers to their state before the first group."""
    loggers = [logging.getLogger(name) for name in ("fogdist", "fog_pg")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.level = [], logging.NOTSET
    monkeypatch.setattr(_logging, "_tell_cpp", lambda: None)
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    _logging.set_up.cache_clear()
    yield
    _logging.set_up.cache_clear()
    for logger, (handlers, level) in zip(loggers, before):
        logger.handlers = handlers
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "cpp", "shown"), [("", None, ["late"]), ("debug", "INFO", ["found", "ready", "late"])]
)
def test_log_lines_have_a_rank(
    fresh_loggers: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    cpp: str | None,
    shown: list[str],
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # removes pytest's handlers
    monkeypatch.setenv("FOG_LOG_LEVEL", level)
    monkeypatch.setenv("RANK", "3")
    _logging.set_up()
    # This change is undone with the other changes of this test.
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", os.environ.get("TORCH_CPP_LOG_LEVEL", "unset"))
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == (cpp or "unset")
    logging.getLogger("fog_pg").debug("found")
    logging.getLogger("fogdist.context").info("ready")
    logging.getLogger("fogdist").warning("late")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == shown
    assert all("[rank 3]" in line for line in lines), lines


def test_log_goes_to_the_handlers_of_the_program(
    fresh_loggers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", seen.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    _logging.set_up()
    logging.getLogger("fogdist").warning("late")
    assert [record.getMessage() for record in seen] == ["late"]
    assert capsys.readouterr().err == ""


IMPORTED_FIRST = """
import os
import torch
import torch.distributed as dist
os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
os.environ["FOG_LOG_LEVEL"] = "debug"
dist.init_process_group("fog", store=dist.HashStore(), rank=0, world_size=1)
# By the C++ code of torch.
dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
"""


def test_level_reaches_cpp_code_of_a_torch_that_is_imported() -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "python")])
    done = subprocess.run(
        [sys.executable, "-c", "import fog_pg\n" + IMPORTED_FIRST],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    assert re.search(r"\[rank -\] INFO fog_pg: fog \S+, extension \S+, MPI ", done.stderr), done.stderr
    assert re.search(r"^\S*\[I.*\[c10d\]", done.stderr, re.MULTILINE), done.stderr
