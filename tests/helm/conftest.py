"""Rendering the chart as Helm does, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

CHART_DIR = Path(__file__).parents[2] / "helm"
RELEASE = "tidegate"
NAMESPACE = "edge"

AGENTS: dict[str, Any] = {
    "agents": {"enabled": True, "caFingerprint": "ab" * 32, "joinToken": {"existingSecret": "join"}}
}
VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "agents": AGENTS,
    "agent pools": {
        "agents": AGENTS["agents"]
        | {
            "hostNetwork": True,
            "privileged": True,
            "supplementalGroups": [44, 109],
            "state": {"hostPath": "/var/lib/tidegate-agent"},
            "devices": [
                {"name": "npu", "path": "/dev/dri/renderD129", "type": "CharDevice"},
                {"name": "runtime", "path": "/usr/lib/librknnrt.so", "type": "File", "readOnly": True},
            ],
            "pools": {
                "rk3588": {"platform": "rk3588", "nodeSelector": {"tidegate.io/platform": "rk3588"}},
                "orin": {
                    "platform": "jetson-orin",
                    "privileged": False,
                    "devices": [],
                    "controllerAddress": "tidegate://centre.example:7443",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                },
            },
        }
    },
    "external store": {"store": {"enabled": False, "external": {"url": "rediss://:secret@store.example:6380/0"}}},
    "everything brought along": {
        "controller": {
            "auth": {"existingSecret": "my-key", "secretKey": "key"},
            "persistence": {"existingClaim": "my-claim"},
            "llm": {"baseUrl": "https://llm.example/v1", "model": "m: 7b #1", "existingSecret": "my-llm"},
            "ray": "ray://head.ray.svc:10001",
            "host": "::",
            "advertise": "centre.example",
        },
        "store": {"enabled": False, "external": {"existingSecret": "my-store", "secretKey": "address"}},
        "serviceAccounts": {"create": False, "controller": "my-account"},
        "rbac": {"create": False},
    },
    "published": {
        "controller": {
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"},
                "hosts": ["tidegate.example"],
                "tls": [{"secretName": "tidegate-tls", "hosts": ["tidegate.example"]}],
            },
            "service": {"annotations": {"a.example/b": "c"}},
            "doorService": {"type": "NodePort", "nodePort": 30443},
        }
    },
    "watched and fenced": AGENTS
    | {
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "enabled": True,
            "apiFrom": [{"namespaceSelector": {}}],
            "doorFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        },
        "controller": {"podDisruptionBudget": {"enabled": True}},
        "rbac": {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]},
    },
    "scheduled": {
        "imageRegistry": "mirror.example:5000/tidegate",
        "imagePullSecrets": ["mirror"],
        "commonLabels": {"team": "edge"},
        "controller": {
            "replicas": 0,
            "image": {"digest": "sha256:" + "0" * 64},
            "nodeSelector": {"zone": "a"},
            "tolerations": [{"key": "edge", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "podAnnotations": {"a.example/b": "c"},
            "extraArgs": ["--log-level=DEBUG"],
            "extraEnv": [{"name": "PIP_INDEX_URL", "value": "https://mirror.example/simple"}],
            "persistence": {"enabled": False},
        },
        "store": {"persistence": {"enabled": False}, "priorityClassName": "high"},
    },
    "other ports": AGENTS | {"controller": {"ports": {"api": 9000, "door": 9443}, "service": {"port": 443}}},
}


Manifest = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """What one set of values becomes."""

    manifests: list[Manifest]
    notes: str

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """The manifests of these kinds."""
        return [m for m in self.manifests if m["kind"] in kinds]

    def one(self, kind: str, name: str) -> Manifest:
        """The manifest of that kind and name."""
        return next(m for m in self.of_kind(kind) if m["metadata"]["name"] == name)

    def pods(self) -> list[tuple[str, Manifest, Manifest]]:
        """(owner, metadata, spec) of every pod that would run."""
        found = []
        for manifest in self.manifests:
            name = f"{manifest['kind']}/{manifest['metadata']['name']}"
            if manifest["kind"] == "Pod":
                found.append((name, manifest["metadata"], manifest["spec"]))
            elif "template" in manifest.get("spec", {}):
                template = manifest["spec"]["template"]
                found.append((name, template["metadata"], template["spec"]))
        return found

    def containers(self) -> list[tuple[str, Manifest, Manifest]]:
        """(owner, pod spec, container) of every container that would run."""
        return [
            (name, spec, c)
            for name, _, spec in self.pods()
            for c in spec.get("initContainers", []) + spec["containers"]
        ]


class _NoDoubleKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, which YAML readers otherwise drop without a word."""


def _mapping(loader: _NoDoubleKeys, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    doubled = {key for key in keys if keys.count(key) > 1}
    if doubled:
        raise ValueError(f"{doubled} stand twice in one mapping{node.start_mark}")
    return loader.construct_mapping(node, deep=True)


_NoDoubleKeys.add_constructor("tag:yaml.org,2002:map", _mapping)

Render = Callable[[dict[str, Any]], Rendered]


@pytest.fixture(scope="session")
def chart() -> helm.Chart:
    return helm.Chart.load(CHART_DIR)


@pytest.fixture(scope="session")
def render(chart: helm.Chart) -> Render:
    """Renders values; raises the error that a user of `helm install` would see."""

    def rendered(values: dict[str, Any]) -> Rendered:
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
        notes = next(text for path, text in files.items() if path.endswith("NOTES.txt"))
        documents = [
            d for path, text in files.items() if path.endswith(".yaml") for d in yaml.load_all(text, _NoDoubleKeys)
        ]
        return Rendered([d for d in documents if d], notes)

    return rendered


@pytest.fixture(params=sorted(VALUE_SETS))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VALUE_SETS[request.param]


@pytest.fixture
def rendered(render: Render, values: dict[str, Any]) -> Rendered:
    return render(values)
