"""Checks the documentation: code compiles and names exist, links have targets, every public name has its entry."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import string
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fogdist
import pytest
from fogdist import algorithms, topology, training
from reference import Checks
from scripts import ROOT

DOCS = ROOT / "docs"
SOURCES = ("python", "fog_pg")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Returns the text of a page, with empty lines in place of its code."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), page.read_text())
    return re.sub(r"`[^`\n]*`", "", text)


# --- code ---------------------------------------------------------------------------------------------------


def dotted(node: ast.expr) -> str | None:
    """Returns the name that an expression such as ``fogdist.topology.base_graph`` spells; None for any other."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def find(name: str) -> Any:
    found: Any = fogdist
    for part in name.split(".")[1:]:
        # a module that `import fogdist` does not import
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def test_python_blocks_compile_and_use_names_that_exist() -> None:
    found = [(page, *block) for page in PAGES for block in FENCE.findall(page.read_text())]
    blocks = [(page, code) for page, _, language, code in found if language == "python"]
    assert len(blocks) > 20
    with Checks() as checks:
        for page, code in blocks:
            try:
                tree = ast.parse(code)
            except SyntaxError as error:
                checks.true(f"{name_of(page)}: {error}\n{code}", False)
                continue
            names = {dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            for name in sorted(name for name in names if name and name.startswith("fogdist.")):
                try:
                    find(name)
                except AttributeError as error:
                    checks.true(f"{name_of(page)}: {name}: {error}", False)


# --- links --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as both mkdocs and GitHub make them from plain words."""
    headings = re.findall(r"^#+ +(.*)$", prose_with_code_names(page), re.MULTILINE)
    slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}
    for included in re.findall(r'^--8<-- "(\S+\.md)"$', page.read_text(), re.MULTILINE):
        slugs |= anchors(ROOT / included)
    return slugs


def prose_with_code_names(page: Path) -> str:
    return FENCE.sub("", page.read_text()).replace("`", "")


@pytest.mark.style
def test_links_lead_somewhere() -> None:
    found = 0
    with Checks() as checks:
        for page in PAGES:
            for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
                if target.startswith(("http://", "https://")):
                    continue
                found += 1
                path, _, anchor = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                checks.true(f"{name_of(page)}: {target}", file.is_file())
                if anchor and file.suffix == ".md" and file.is_file():
                    checks.true(f"{name_of(page)}: {target}", anchor in anchors(file))
    assert found > 50


@pytest.mark.style
def test_files_that_pages_name_exist() -> None:
    pattern = re.compile(r"`((?:docs|tests|examples|benchmarks|python|fog_pg|csrc)/[\w./-]+\.\w+)`")
    with Checks() as checks:
        for page in PAGES:
            for name in pattern.findall(page.read_text()):
                if name.endswith("NAME.py"):
                    continue
                checks.true(f"{name_of(page)}: {name}", (ROOT / name).exists())


@pytest.mark.style
def test_every_file_of_tests_stands_in_a_row_of_the_promises() -> None:
    rows = "".join(line for line in (DOCS / "testing.md").read_text().splitlines() if line.startswith("|"))
    files = {path.name for path in (ROOT / "tests").glob("test_*.py")}
    assert files - set(re.findall(r"`(test_\w+\.py)`", rows)) == set()


@pytest.mark.style
def test_no_file_has_the_marks_of_a_merge_that_was_not_resolved() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.split("\0") if name] if listed.returncode == 0 else PAGES
    mark = re.compile(r"^(?:<{7} |>{7} )|\s>{7} [0-9a-f]{7,}", re.MULTILINE)
    with Checks() as checks:
        for file in files:
            if file.is_file() and (found := mark.search(file.read_text(errors="replace"))):
                checks.true(f"{name_of(file)}: {found[0]!r}", False)


@pytest.mark.style
def test_lines_have_at_most_120_columns_except_in_tables() -> None:
    with Checks() as checks:
        for page in PAGES:
            for number, line in enumerate(page.read_text().splitlines(), 1):
                is_fine = len(line) <= 120 or line.startswith("|")
                checks.true(f"{name_of(page)}:{number}: {len(line)} columns", is_fine)


@pytest.mark.style
def test_docstrings_have_no_line_that_a_reflow_cut_short() -> None:
    """Such a line is far shorter than the one before it, and the sentence goes on in the next one."""
    with Checks() as checks:
        for file in (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py*"))):
            if file.suffix not in (".py", ".pyi"):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                    lines = node.body[0].value.value.split("\n")
                    for before, line, after in zip(lines, lines[1:], lines[2:]):
                        next_word = (after.split() or ["."])[0]
                        goes_on = next_word[0] in "`" + string.ascii_lowercase and not line.endswith(
                            (".", ".)", ":", ";")
                        )
                        is_short = len(before) > 80 > len(f"{line} {next_word}") and line.strip()
                        checks.true(f"{name_of(file)}: {line!r}", not (is_short and goes_on))


# --- reference ----------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    entries = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(set(entries)) == len(entries)
    described = {entry.rpartition(".")[2] for entry in entries}
    packages = {
        "algorithms",
        "bluefog",
        "checkpoint",
        "compression",
        "flight_record",
        "membership",
        "metrics",
        "timeline",
        "topology",
    }
    modules = (fogdist, topology, algorithms, training, fogdist.timeline, fogdist.metrics)
    modules += (fogdist.checkpoint, fogdist.compression)
    public = {name for module in modules for name in module.__all__}
    assert public - packages <= described, sorted(public - packages - described)


@pytest.mark.style
def test_site_has_every_page_in_its_navigation() -> None:
    """mkdocs checks this too, if it is installed."""
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


@pytest.mark.long
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed here; make docs builds the site in an environment of its own")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.style
def test_numbers_of_scaling_are_those_of_the_results() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "performance_tables.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
