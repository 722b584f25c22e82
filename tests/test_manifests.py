"""Checks the manifest for Kubernetes in the documentation against the published schemas."""

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


def test_manifests_follow_the_schema() -> None:
    found = documents()
    assert [document["kind"] for document in found] == ["Service", "Job"]
    for document in found:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_validator_refuses_a_wrong_manifest() -> None:
    job = next(each for each in documents() if each["kind"] == "Job")
    job["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)
