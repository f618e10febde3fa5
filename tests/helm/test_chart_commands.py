"""The commands that chart, notes and installation guide give are commands that `tidegate` understands."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from agents.enroll import parse_fingerprint, parse_url
from controller.cli import build_parser
from policies.platforms import PLATFORMS

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
ROOT = Path(__file__).parents[2]


def _arguments(container: dict[str, Any]) -> argparse.Namespace:
    """What the command line makes of a container's arguments; variables that come from elsewhere get a stand-in."""
    assert container["command"] == ["tidegate"]
    variables: dict[str, str] = {}

    def expand(text: str) -> str:
        return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)

    for variable in container["env"]:
        variables[variable["name"]] = expand(variable["value"]) if "value" in variable else "10.0.0.7"
    return build_parser().parse_args([expand(text) for text in container["args"]])


def test_the_controller_starts_with_what_the_chart_says(rendered: Any, values: dict[str, Any]) -> None:
    (container,) = rendered.one("Deployment", "tidegate-controller")["spec"]["template"]["spec"]["containers"]
    arguments = _arguments(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    told = values.get("controller", {})
    assert (arguments.port, arguments.agent_port) == (ports["api"], ports["door"])
    assert arguments.dir in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert arguments.ray == told.get("ray", "local")
    assert arguments.llm_base_url == told.get("llm", {}).get("baseUrl")
    assert arguments.store is None, "its password would be seen in the list of processes"
    assert "TIDEGATE_STORE_URL" in {variable["name"] for variable in container["env"]}
    if "llm" in told:
        assert arguments.llm_model == told["llm"]["model"]


def test_agents_start_with_what_the_chart_says(rendered: Any) -> None:
    for daemon_set in rendered.of_kind("DaemonSet"):
        (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
        arguments = _arguments(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert arguments.peer_port == ports["peer"]
        assert all(f":{arguments.ingress_port}/" in container[probe]["exec"]["command"][-1] for probe in PROBES)
        assert parse_url(arguments.controller)[1] in {7443, 9443}
        assert parse_fingerprint(arguments.ca_fingerprint)
        assert arguments.platform in PLATFORMS
        assert arguments.dir in mounts
        assert str(Path(arguments.token_file).parent) in mounts
        assert arguments.host == "10.0.0.7"


def test_every_platform_of_the_schema_exists_and_none_that_runs_linux_is_missing() -> None:
    schema = json.loads((ROOT / "helm" / "values.schema.json").read_text())
    listed = set(schema["definitions"]["agentPool"]["properties"]["platform"]["enum"])
    assert listed == {name for name, p in PLATFORMS.items() if not p.is_cloud} - {"apple-ane"}


def _commands(text: str) -> list[list[str]]:
    """Every `tidegate ...` command of a text, also behind `kubectl exec ... --`, with continued lines joined."""
    joined = text.replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    found = (re.search(r"(?:^|-- )tidegate ([a-z].*)", line) for line in lines)
    return [shlex.split(match[1].split(" <")[0].split(" |")[0]) for match in found if match]


@pytest.mark.parametrize("source", ["notes", "guide"])
def test_commands_in_the_texts_are_understood(render: Any, source: str) -> None:
    text = (
        render({}).notes
        if source == "notes"
        else "\n".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs/install.md").read_text(), re.S))
    )
    commands = _commands(text)
    assert {" ".join(command[:2]) for command in commands} >= {"token create", "sla apply", "agent join"}
    for command in commands:
        build_parser().parse_args(command)
