"""Checks the manifests for Kubernetes against the published schemas, and what they and the script for Slurm start."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from scripts import ROOT

sys.path.append(str(ROOT / "python"))
import fog_cli
from fog_cli.commands import run

MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
PAGE = ROOT / "docs" / "howto" / "kubernetes.md"
# The first version in which `backoffLimitPerIndex` is stable.
LEAST_VERSION = "1.33"


def documents(path: Path) -> list[dict[str, Any]]:
    """Returns the documents of a manifest, or of all manifests in a page of the documentation."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n---\n".join(re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("path", [*MANIFESTS, PAGE], ids=lambda path: path.name)
def test_manifests_follow_the_schema(path: Path) -> None:
    found = documents(path)
    assert [document["kind"] for document in found] == ["Service", "Job"]
    for document in found:
        kubernetes_validate.validate(document, LEAST_VERSION, strict=True)


def test_the_validator_refuses_a_wrong_manifest() -> None:
    job = next(each for each in documents(MANIFESTS[0]) if each["kind"] == "Job")
    job["spec"]["backoffLimitPerIndexes"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, LEAST_VERSION, strict=True)


def test_the_job_keeps_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = documents(MANIFESTS[0])
    spec = job["spec"]
    pod = spec["template"]["spec"]
    # Only with these the loss of one pod leaves the others.
    assert (
        spec["completionMode"] == "Indexed"
        and spec["backoffLimitPerIndex"] == 0
        and "backoffLimit" not in spec
    )
    assert pod["restartPolicy"] == "Never" and spec["completions"] == spec["parallelism"]
    # The names of the pods.
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    shell, option, line = container["command"]
    assert (shell, option) == ("/bin/sh", "-c") and line.startswith("exec fog ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for number in range(spec["completions"]):
        words = shlex.split(line.replace("$JOB_COMPLETION_INDEX", str(number)))[2:]
        plan = run.prepare(fog_cli.parser().parse_args(words), dict(os.environ))
        assert [host.name for host in plan.hosts] == [
            f"{job['metadata']['name']}-{each}.{pod['subdomain']}" for each in range(spec["completions"])
        ]
        assert [start is not None for start in plan.starts] == [
            each == number for each in range(len(plan.starts))
        ]


def test_the_script_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "examples" / "slurm" / "training.sbatch").read_text()
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text()
    plain = [re.sub(r" # .*", "", line) for line in text.splitlines()]
    assert (
        "\n".join([plain[0], *(line for line in plain if re.match("#SBATCH --(nodes|ex|no-)|exec", line))])
        in page
    )
    assert re.search(r"^#SBATCH --no-kill\b", text, re.MULTILINE)
    nodes = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    assert nodes
    (line,) = (line for line in text.splitlines() if line.startswith("exec fog "))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(run.shutil, "which", lambda name, **_: f"/bin/{name}")
    names = [run.Host(f"n{number}", 4) for number in range(int(nodes[1]))]
    monkeypatch.setattr(run, "_allocated_hosts", lambda *_: names)
    arguments = fog_cli.parser().parse_args(shlex.split(line)[2:])
    plan = run.prepare(arguments, {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": nodes[1]})
    assert [start[0] for start in plan.starts if start] == ["srun"] * len(names)
