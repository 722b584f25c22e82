"""Checks that the module, the documentation and the code agree on environment variables; values, errors, the log."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from scripts import ROOT

from fog_pg import _C, _logging, _settings, environment
from fog_pg.environment import VARIABLES, Variable

PYTHON = [*ROOT.glob("fog_pg/*.py"), *ROOT.glob("python/fogdist/**/*.py")]
# The command line works without fog_pg, whose import imports torch.
COMMAND_LINE = list(ROOT.glob("python/fog_cli/**/*.py"))
CPP = [path for path in ROOT.glob("csrc/**/*.[ch]pp") if "getenv(" in path.read_text()]
TABLE = (ROOT / "docs" / "environment.md").read_text()

# Names that the C++ code sets or removes for the start of MPI, and does not read.
SET_FOR_MPI = {
    "MPIR_CVAR_PMI_VERSION",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMIX_SERVER_URI2",
    "PMIX_SERVER_URI3",
    "PMI_FD",
    "PMI_ID",
    "PMI_PORT",
    "PMI_RANK",
    "PMI_SIZE",
}


def listed(reader: str) -> set[str]:
    return {variable.name for variable in VARIABLES if reader in variable.reader}


def default_of(variable: Variable[object]) -> str:
    value = variable.default
    if value in ("", -1) or (value == 0 and variable.kind is not environment.FLAG):
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def row(variable: Variable[object]) -> str:
    """Returns the beginning of a variable's row in the documentation's table, up to what it means."""
    default = f"`{shown}`" if (shown := default_of(variable)) else ""
    if variable.owner != "fog":
        return f"| `{variable.name}` | {variable.owner} | "
    when = "build" if variable.reader == "build" else "run"
    return f"| `{variable.name}` | {when} | {variable.kind.name} | {default} | "


def test_documentation_has_each_variable_as_the_module_has_it() -> None:
    wanted = [row(variable) for variable in VARIABLES if variable.owner != "tests"]
    found = [line for line in TABLE.splitlines() if line.startswith("| `")]
    assert len(found) == len(wanted)
    for line, begin in zip(found, wanted):
        assert line.startswith(begin) and line.removeprefix(begin).endswith(". |"), begin


def test_python_reads_what_is_listed_and_through_the_module_only() -> None:
    read = set()
    for path in PYTHON:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "environment":
                variable = getattr(environment, node.attr, None)
                if isinstance(variable, Variable):
                    read.add(variable.name)
        if path.name == "environment.py" or path.parts[-2:] == ("common", "__init__.py"):
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
    assert {"RANK"} <= read <= {variable.name for variable in VARIABLES}


def test_cpp_reads_what_is_listed() -> None:
    names = {
        name
        for path in CPP
        for line in path.read_text().splitlines()
        for name in re.findall(r'"([A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])"', line)
        if not name.startswith("MPI_THREAD_")
        and "check_setting(" not in line  # that names what Python has read
    }
    assert names - SET_FOR_MPI == listed("C++")


def test_cpp_gets_each_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has another value than the default here, so none is forgotten."""
    given = {"BETWEEN_HOSTS": "tcp", "INTERFACE": "lo", "JOB_SECRET": "a secret of tests", "TIMELINE": "t_"}
    given |= {
        "RMA_BYTES": "1048576",
        "HOST_TIMEOUT": "4",
        "WARN_AFTER": "5",
        "LOST_AFTER": "6",
        "MAX_RANKS": "7",
    }
    for name, text in given.items():
        monkeypatch.setenv(f"FOG_{name}", text)
    others = {
        "_FOG_LOCAL_LINKS": "0",
        "_FOG_CONNECTIONS": "3",
        "LOCAL_WORLD_SIZE": "8",
        "PMI_RANK": "9",
        "PMI_SIZE": "10",
    }
    for name, text in others.items():
        monkeypatch.setenv(name, text)
    seen: list[Any] = []
    _settings.apply(SimpleNamespace(Settings=_C.Settings, set_settings=seen.append))
    values = {
        name: getattr(seen[0], name)
        for name, value in vars(_C.Settings).items()
        if isinstance(value, property)
    }
    wanted = {name.lower(): int(text) if text.isdecimal() else text for name, text in given.items()}
    assert values == wanted | {
        "local_links": False,
        "connections": 3,
        "local_ranks": 8,
        "launcher_rank": 9,
        "launcher_size": 10,
    }


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ("", None),
        ("PMI_RANK=1 PMI_SIZE=2", (1, 2)),
        ("PMI_RANK=1 PMI_SIZE=2 TORCHELASTIC_RUN_ID=x", None),
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3", (0, 3)),
        ("SLURM_PROCID=0 SLURM_NTASKS=4", None),  # a batch shell
        ("SLURM_PROCID=0 SLURM_NTASKS=4 PMIX_RANK=0", (0, 4)),
    ],
)
def test_worlds_of_launchers(
    monkeypatch: pytest.MonkeyPatch, variables: str, world: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(os, "environ", dict(word.split("=") for word in variables.split()))
    assert _settings.launcher_world() == world


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
    # This counts as unset; what is set later is undone with it.
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "")
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
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == (cpp or "")
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
