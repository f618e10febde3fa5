"""The chart lints, renders, and every manifest is what Kubernetes accepts, on the oldest and the newest version."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

CHART_DIR = Path(__file__).parents[2] / "helm"
WITHOUT_SCHEMA = {"ServiceMonitor"}
"""Kinds that an operator brings, so that Kubernetes itself has no schema of them."""


def test_lints_without_a_warning(values: dict[str, Any]) -> None:
    report = helm.lint(CHART_DIR, values, strict=True)
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("kubernetes_version", ["1.27", kubernetes_validate.latest_version()])
def test_every_manifest_passes_the_schema_of_kubernetes(rendered: Any, kubernetes_version: str) -> None:
    for manifest in rendered.manifests:
        if manifest["kind"] not in WITHOUT_SCHEMA:
            kubernetes_validate.validate(manifest, kubernetes_version, strict=True)


def test_every_resource_has_its_labels_namespace_and_a_name_of_its_own(rendered: Any) -> None:
    identities = [(m["kind"], m["metadata"]["name"]) for m in rendered.manifests]
    assert len(identities) == len(set(identities))
    for manifest in rendered.manifests:
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "tidegate"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert manifest["metadata"]["namespace"] == "edge"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"controler": {}}, "controler"),
        ({"controller": {"replcas": 1}}, "replcas"),
        ({"controller": {"replicas": 3}}, "/controller/replicas"),
        ({"controller": {"ports": {"api": 80}}}, "/controller/ports/api"),
        ({"controller": {"resources": {"limit": {"memory": "1Gi"}}}}, "limit"),
        ({"store": {"auth": {"password": "with/slash"}}}, "/store/auth/password"),
        ({"agents": {"caFingerprint": "AB"}}, "/agents/caFingerprint"),
        ({"agents": {"platform": "rk3599"}}, "/agents/platform"),
        ({"agents": {"pools": {"a": {"nodeSelectors": {}}}}}, "nodeSelectors"),
        ({"agents": {"devices": [{"name": "npu", "pth": "/dev/npu"}]}}, "pth"),
        ({"networkPolicy": {"apiFrom": [{"namespace": {}}]}}, "namespace"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused_by_name(
    chart: helm.Chart, values: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(helm.HelmValuesError) as refused:
        chart.validate_schema(values)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"store": {"enabled": False}},
            "store.external.url or store.external.existingSecret must say where the store is",
        ),
        ({"store": {"external": {"url": "redis://a:1"}}}, "set store.enabled=false to use the external store"),
        ({"controller": {"llm": {"baseUrl": "http://llm"}}}, "controller.llm.model must name the model"),
        ({"controller": {"ingress": {"enabled": True}}}, "controller.ingress.hosts must list"),
        ({"agents": {"enabled": True, "joinToken": {"existingSecret": "join"}}}, "agents.caFingerprint must be"),
        ({"agents": {"enabled": True, "caFingerprint": "ab" * 32}}, "agents.joinToken.existingSecret must name"),
    ],
)
def test_values_that_contradict_each_other_are_refused_in_one_sentence(
    render: Any, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(values)
    assert sentence in str(refused.value)


def test_values_and_schema_list_the_same_keys_and_every_key_is_described() -> None:
    schema = json.loads((CHART_DIR / "values.schema.json").read_text())
    values = yaml.safe_load((CHART_DIR / "values.yaml").read_text())

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        """The schema behind references; a description beside a reference counts."""
        reference = node.get("$ref") or next((part["$ref"] for part in node.get("allOf", [])), None)
        if reference is None:
            return node
        target: Any = schema
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        return resolve(target) | {k: v for k, v in node.items() if k == "description"}

    def compare(value: dict[str, Any], node: dict[str, Any], path: str) -> None:
        assert value.keys() == node["properties"].keys(), path
        for key, child in node["properties"].items():
            described = resolve(child)
            assert described.get("description"), f"{path}.{key}"
            is_group = described.get("additionalProperties") is False and isinstance(value[key], dict)
            if is_group and not value[key].keys() <= {"requests", "limits"}:
                compare(value[key], described, f"{path}.{key}")

    compare(values, schema, "values")


def test_generated_secrets_are_long_and_differ(render: Any) -> None:
    def secrets(rendered: Any) -> list[str]:
        return [base64.b64decode(v).decode() for s in rendered.of_kind("Secret") for v in s["data"].values()]

    first, second = secrets(render({})), secrets(render({}))
    assert len(first) == 2
    assert all(len(secret) == 40 and secret.isalnum() for secret in first)
    assert len({*first, *second}) == 4


def test_given_secrets_are_taken_as_they_are(render: Any) -> None:
    rendered = render({"controller": {"auth": {"adminKey": "k" * 20}}, "store": {"auth": {"password": "p" * 20}}})
    assert base64.b64decode(rendered.one("Secret", "tidegate-admin")["data"]["admin-key"]).decode() == "k" * 20
    assert base64.b64decode(rendered.one("Secret", "tidegate-store")["data"]["password"]).decode() == "p" * 20


def test_no_secret_stands_outside_of_secrets(render: Any) -> None:
    rendered = render({"controller": {"auth": {"adminKey": "k" * 20}}, "store": {"auth": {"password": "p" * 20}}})
    elsewhere = yaml.safe_dump([m for m in rendered.manifests if m["kind"] != "Secret"]) + rendered.notes
    assert "k" * 20 not in elsewhere
    assert "p" * 20 not in elsewhere


def test_a_pool_overrides_also_with_false_and_nothing(render: Any) -> None:
    from_helm = render(
        {
            "agents": {
                "enabled": True,
                "caFingerprint": "ab" * 32,
                "joinToken": {"existingSecret": "join"},
                "privileged": True,
                "devices": [{"name": "npu", "path": "/dev/npu"}],
                "state": {"hostPath": "/var/lib/tidegate-agent"},
                "pools": {"plain": {"privileged": False, "devices": [], "state": {"hostPath": ""}}, "npu": {}},
            }
        }
    )
    plain = from_helm.one("DaemonSet", "tidegate-agents-plain")["spec"]["template"]["spec"]
    npu = from_helm.one("DaemonSet", "tidegate-agents-npu")["spec"]["template"]["spec"]
    assert plain["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    assert not any("hostPath" in volume for volume in plain["volumes"])
    assert npu["containers"][0]["securityContext"]["privileged"] is True
    assert sum("hostPath" in volume for volume in npu["volumes"]) == 2


def test_long_names_stay_within_what_kubernetes_allows(chart: helm.Chart) -> None:
    files = chart.render({}, name="r" * 53, namespace="edge")
    for path, text in files.items():
        if path.endswith(".yaml"):
            for manifest in filter(None, yaml.safe_load_all(text)):
                kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
                assert len(manifest["metadata"]["name"]) <= 63
                assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())


def test_notes_lead_on(render: Any) -> None:
    notes = render({}).notes
    for step in (
        "get secret tidegate-admin",
        "port-forward svc/tidegate ",
        "tidegate sla apply",
        "tidegate token create",
        "tidegate agent join",
    ):
        assert step in notes
    warned = render(
        {"controller": {"persistence": {"enabled": False}}, "store": {"persistence": {"enabled": False}}}
    ).notes
    assert warned.count("WARNING") == 2
