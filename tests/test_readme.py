"""Runs scripts in the README and in docs/, and compares commands in the README with the project."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from harness import ALL, WorldPool
from scripts import ROOT, run_script

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text()
BLOCKS = BLOCK.findall(README)
# Python blocks of these pages are scripts if their first line is a command; tests/test_docs.py compiles the others.
PAGES = sorted((ROOT / "docs").rglob("*.md"))

# The pattern of each line that a rank prints, for blocks whose output the page does not show.
PATTERNS = {
    "resume.py": r"rank \d: steps 1 to 20",
    "tutorial.py": r"rank \d: test accuracy 9[3-9]\.\d%",
}


@dataclass(frozen=True)
class Example:
    """A script of the README or of docs/.

    Attributes:
        name: File name, from the block's first line.
        ranks: Number of ranks, from the torchrun command in the block's first line.
        code: The whole block, and those of the page that begin with its name and "continued".
        output: The output that the page shows; None if it shows none.
    """

    name: str
    ranks: int
    code: str
    output: str | None


def examples_of(blocks: list[tuple[str, str]], every_block: bool) -> list[Example]:
    found = []
    for (language, code), (next_language, next_block) in zip(blocks, [*blocks[1:], ("", "")]):
        if language != "python":
            continue
        if found and code.startswith(f"# {found[-1].name}, continued\n"):
            found[-1] = replace(found[-1], code=found[-1].code + code)
            continue
        first = re.match(r"# (\S+\.py): torchrun --nproc_per_node=(\d+) \1\n", code)
        assert first or not every_block, f"the first line must name the file and its command:\n{code}"
        if first:
            output = next_block if next_language == "text" else None
            found.append(Example(first[1], int(first[2]), code, output))
    return found


def examples() -> list[Example]:
    found = examples_of(BLOCKS, every_block=True)
    for page in PAGES:
        found += examples_of(BLOCK.findall(page.read_text()), every_block=False)
    return found


def rank_lines(output: str) -> list[str]:
    """Returns the lines that the ranks printed, sorted.

    torchrun starts Python unbuffered: the end of a line is a separate write, and another rank's line may come before
    it.
    """
    parts = re.split(r"\n|(?=rank \d+: )", output)
    return sorted(part.rstrip() for part in parts if part.startswith("rank "))


def test_readme_shows_consensus_and_optimizer() -> None:
    names = [example.name for example in examples()]
    assert {"average.py", "train.py"} <= {example.name for example in examples_of(BLOCKS, every_block=True)}
    assert len(set(names)) == len(names), names


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_python_block_runs(tmp_path: Path, script_worlds: WorldPool, example: Example) -> None:
    """Uses torchrun, as the block says, in test-all only; tests/test_bootstrap.py compares torchrun with mpiexec."""
    script = tmp_path / example.name
    script.write_text(example.code)
    launcher = "torchrun" if ALL else script_worlds
    output = run_script([script], example.ranks, tmp_path / "log.txt", launcher)
    lines = rank_lines(output)
    assert len(lines) == example.ranks, output
    if example.output is not None:
        assert lines == example.output.splitlines()
    else:
        assert all(re.fullmatch(PATTERNS[example.name], line) for line in lines), output


def test_commands_name_what_is_there() -> None:
    commands = "\n".join(block for language, block in BLOCKS if language == "sh")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", commands, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    scripts = re.findall(r"\bexamples/\w+\.py", README)
    assert scripts
    for script in scripts:
        assert (ROOT / script).is_file(), script


def test_plain_way_installs_what_the_build_requires() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w.-]+", requirement.strip('"'))[0].lower() for requirement in requirements}

    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    first = re.search(r"^pip install (torch.*)$", README, re.MULTILINE)
    assert first and names(first[1].split()) == {"torch", *names(project["build-system"]["requires"])}
    extra = re.search(r"^pip install (scikit-learn.*?) *#", README, re.MULTILINE)
    assert extra and names(extra[1].split()) == names(project["project"]["optional-dependencies"]["examples"])
