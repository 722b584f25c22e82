"""Checks the manifests for Kubernetes in the documentation against the published schemas."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from scripts import ROOT

PAGE = ROOT / "docs" / "howto" / "kubernetes.md"
VERSION = "1.33"


def documents() -> list[dict[str, Any]]:
    """Returns the documents of the manifests in the page."""
    return list(
        yaml.safe_load_all(
            "\n---\n".join(re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
        )
    )


# The fields of a JobSet above its Jobs, as its resource definition has them: https://github.com/kubernetes-sigs/jobset.
JOB_SET = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
FIELDS = {
    "spec": "coordinator failurePolicy managedBy network replicatedJobs startupPolicy successPolicy suspend "
    "ttlSecondsAfterFinished",
    "network": "enableDNSHostnames publishNotReadyAddresses subdomain",
    "failurePolicy": "maxRestarts restartStrategy rules",
    "replicatedJob": "dependsOn groupName name replicas template",
}


def jobs_of(job_set: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the Jobs of a JobSet, whose own fields are checked."""
    spec = job_set["spec"]
    assert job_set | JOB_SET == job_set and job_set.keys() == {*JOB_SET, "metadata", "spec"}
    parts = [("spec", spec), *((name, spec[name]) for name in ("network", "failurePolicy"))]
    for name, part in (*parts, *(("replicatedJob", each) for each in spec["replicatedJobs"])):
        assert part.keys() <= set(FIELDS[name].split()), name
    of_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": job_set["metadata"]}
    return [of_job | each["template"] for each in spec["replicatedJobs"]]


def test_manifests_follow_the_schema() -> None:
    found = documents()
    assert [document["kind"] for document in found] == ["Service", "Job", "Secret", "JobSet"]
    for document in [*found[:-1], *jobs_of(found[-1])]:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_pods_of_a_job_set_call_each_other_by_their_names() -> None:
    job_set = documents()[-1]
    (job,) = jobs_of(job_set)
    replicated = job_set["spec"]["replicatedJobs"][0]
    base, domain = f"{job_set['metadata']['name']}-{replicated['name']}-0", job_set["metadata"]["name"]
    names = [f"{base}-{index}.{domain}:4" for index in range(job["spec"]["completions"])]
    assert f"-H {','.join(names)} " in job["spec"]["template"]["spec"]["containers"][0]["args"][0]


def test_the_validator_refuses_a_wrong_manifest() -> None:
    job = next(each for each in documents() if each["kind"] == "Job")
    job["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)
