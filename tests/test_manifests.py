"""Checks the manifests for Kubernetes in the documentation against the published schemas."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models
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


# Resources that Kubernetes itself does not have. A model leaves out fields that it does not know.
MODELS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainJob": models.TrainerV1alpha1TrainJob}


def check(document: dict[str, Any]) -> None:
    if document["kind"] in MODELS:
        assert MODELS[document["kind"]].from_dict(document).to_dict() == document
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_manifests_follow_the_schema() -> None:
    found = documents()
    assert [document["kind"] for document in found] == ["Service", "Job", "Secret", "JobSet", "TrainJob"]
    for document in found:
        check(document)


def test_the_pods_of_a_job_set_call_each_other_by_their_names() -> None:
    job_set = next(each for each in documents() if each["kind"] == "JobSet")
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]
    base, domain = f"{job_set['metadata']['name']}-{replicated['name']}-0", job_set["metadata"]["name"]
    names = [f"{base}-{index}.{domain}:4" for index in range(job["spec"]["completions"])]
    assert f"-H {','.join(names)} " in job["spec"]["template"]["spec"]["containers"][0]["args"][0]


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainJob"])
def test_a_field_that_does_not_exist_is_refused(kind: str) -> None:
    document = next(each for each in documents() if each["kind"] == kind)
    check(document)
    document["spec"]["completionModes"] = "Indexed"
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        check(document)
