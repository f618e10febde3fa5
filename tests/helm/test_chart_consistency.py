"""What one manifest says of another is true: selectors, ports, secrets, volumes, accounts; and no container is root."""

from __future__ import annotations

from typing import Any

BROUGHT_BY_THE_OPERATOR = {"my-key", "my-llm", "my-store", "my-claim", "my-account", "join"}


def _ports(spec: dict[str, Any]) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"] for container in spec["containers"] for port in container.get("ports", [])
    }


def _selected(rendered: Any, selector: dict[str, str]) -> list[dict[str, Any]]:
    return [spec for _, metadata, spec in rendered.pods() if selector.items() <= metadata["labels"].items()]


def test_every_service_selects_pods_of_one_workload_that_have_its_port(rendered: Any) -> None:
    for service in rendered.of_kind("Service"):
        (spec,) = _selected(rendered, service["spec"]["selector"])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in _ports(spec)


def test_workloads_select_their_own_pods_only(rendered: Any) -> None:
    for workload in rendered.of_kind("Deployment", "StatefulSet", "DaemonSet"):
        selected = _selected(rendered, workload["spec"]["selector"]["matchLabels"])
        assert selected == [workload["spec"]["template"]["spec"]]


def test_policies_budgets_and_monitors_select_something(rendered: Any) -> None:
    for policy in rendered.of_kind("NetworkPolicy"):
        specs = _selected(rendered, policy["spec"]["podSelector"]["matchLabels"])
        assert specs
        for rule in policy["spec"]["ingress"]:
            assert all(port["port"] in _ports(spec) for port in rule["ports"] for spec in specs)
    for budget in rendered.of_kind("PodDisruptionBudget"):
        assert len(_selected(rendered, budget["spec"]["selector"]["matchLabels"])) == 1
    for monitor in rendered.of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [s for s in rendered.of_kind("Service") if wanted <= s["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["authorization"]["credentials"]["name"] in {
            s["metadata"]["name"] for s in rendered.of_kind("Secret")
        }


def test_ingresses_lead_to_a_port_that_exists(rendered: Any) -> None:
    for ingress in rendered.of_kind("Ingress"):
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            ports = {port["name"] for port in rendered.one("Service", backend["name"])["spec"]["ports"]}
            assert backend["port"]["name"] in ports


def test_probes_ask_ports_that_the_container_has(rendered: Any) -> None:
    for name, spec, container in rendered.containers():
        probes = [container[kind] for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container]
        assert len(probes) == (0 if name.startswith("Pod/") else 3)
        for probe in probes:
            asked = probe.get("httpGet") or probe.get("tcpSocket")
            assert asked is None or asked["port"] in _ports(spec)


def test_no_container_is_root_or_may_become_it(rendered: Any) -> None:
    for name, spec, container in rendered.containers():
        pod, own = spec["securityContext"], container["securityContext"]
        assert pod["runAsNonRoot"] is True, name
        assert pod["runAsUser"] > 0, name
        assert pod["seccompProfile"]["type"] == "RuntimeDefault", name
        assert own["readOnlyRootFilesystem"] is True, name
        if not own.get("privileged"):
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert not {"runAsUser", "runAsNonRoot"} & own.keys(), name


def test_only_agents_that_were_told_so_are_privileged_or_see_the_node(rendered: Any, values: dict[str, Any]) -> None:
    told = values.get("agents", {})
    for name, spec, container in rendered.containers():
        if not (name.startswith("DaemonSet/") and told.get("privileged")):
            assert not container["securityContext"].get("privileged"), name
        if not (name.startswith("DaemonSet/") and (told.get("state") or told.get("devices"))):
            assert not any("hostPath" in volume for volume in spec.get("volumes", [])), name
        assert spec.get("hostNetwork", False) == (name.startswith("DaemonSet/") and told.get("hostNetwork", False)), (
            name
        )


def test_no_pod_gets_a_token_of_the_kubernetes_api_and_accounts_exist(rendered: Any, values: dict[str, Any]) -> None:
    made = {account["metadata"]["name"] for account in rendered.of_kind("ServiceAccount")}
    for name, _, spec in rendered.pods():
        assert spec["automountServiceAccountToken"] is False, name
        account = spec.get("serviceAccountName", "default")
        assert account == "default" or account in made | BROUGHT_BY_THE_OPERATOR, name
    for binding in rendered.of_kind("RoleBinding"):
        assert rendered.one("Role", binding["roleRef"]["name"])["rules"] == values.get("rbac", {}).get("rules", [])
        assert {subject["name"] for subject in binding["subjects"]} <= made


def test_secrets_config_maps_and_claims_exist_with_the_keys_that_are_asked_for(rendered: Any) -> None:
    held = {(m["kind"], m["metadata"]["name"]): m.get("data", {}).keys() for m in rendered.manifests}
    for name, spec, container in rendered.containers():
        for variable in container.get("env", []):
            wanted = variable.get("valueFrom", {}).get("secretKeyRef")
            if wanted and wanted["name"] not in BROUGHT_BY_THE_OPERATOR:
                assert wanted["key"] in held["Secret", wanted["name"]], name
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                assert volume["secret"]["secretName"] in BROUGHT_BY_THE_OPERATOR, name
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in held, name
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in held or claim in BROUGHT_BY_THE_OPERATOR, name


def test_what_is_mounted_exists_and_what_is_referred_to_in_text_is_defined_before(rendered: Any) -> None:
    for workload in rendered.of_kind("Deployment", "StatefulSet", "DaemonSet"):
        spec = workload["spec"]["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in spec["volumes"]} | claims
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes
            defined: set[str] = set()
            for variable in container["env"]:
                text = variable.get("value", "")
                assert all(part.split(")")[0] in defined for part in text.split("$(")[1:]), variable["name"]
                defined.add(variable["name"])
            assert all(
                part.split(")")[0] in defined for text in container.get("args", []) for part in text.split("$(")[1:]
            )


def test_the_addresses_that_components_dial_are_services_of_the_release(render: Any) -> None:
    agents = {"enabled": True, "caFingerprint": "ab" * 32, "joinToken": {"existingSecret": "join"}}
    rendered = render({"agents": agents, "controller": {"ports": {"door": 9443}}})
    (agent,) = rendered.one("DaemonSet", "tidegate-agents-default")["spec"]["template"]["spec"]["containers"]
    (controller,) = rendered.one("Deployment", "tidegate-controller")["spec"]["template"]["spec"]["containers"]
    agent_env = {v["name"]: v.get("value") for v in agent["env"]}
    controller_env = {v["name"]: v.get("value") for v in controller["env"]}
    assert agent_env["TIDEGATE_CONTROLLER"] == "tidegate://tidegate-door.edge.svc:9443"
    assert controller_env["TIDEGATE_STORE_URL"] == "redis://:$(TIDEGATE_STORE_PASSWORD)@tidegate-store.edge.svc:6379/0"
    assert rendered.one("Service", "tidegate-door")["spec"]["ports"][0]["port"] == 9443
    assert rendered.one("Service", "tidegate-store")["spec"]["ports"][0]["port"] == 6379
