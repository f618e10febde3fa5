from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sla.contract import Contract, contract_from
from sla.errors import ContractError
from sla.openslo import ANNOTATED, to_openslo
from sla.openslo_reader import MAX_OBJECTS, from_openslo
from sla.schema import EXAMPLES

FOREIGN = """
apiVersion: openslo/v1
kind: Service
metadata: {name: shop}
spec: {description: The shop.}
---
apiVersion: openslo/v1
kind: SLI
metadata: {name: shop-latency}
spec:
  thresholdMetric:
    metricSource: {type: Prometheus, spec: {query: request_ms}}
---
apiVersion: openslo/v1
kind: SLO
metadata: {name: shop-latency}
spec:
  service: shop
  indicatorRef: shop-latency
  timeWindow: [{duration: 4w, isRolling: true}]
  budgetingMethod: Occurrences
  objectives: [{op: lte, value: 250, target: 0.99}]
---
apiVersion: openslo/v1
kind: SLO
metadata: {name: shop-errors}
spec:
  service: shop
  indicator:
    metadata: {name: errors}
    spec: {ratioMetric: {counter: true, good: {metricSource: {}}, total: {metricSource: {}}}}
  timeWindow: [{duration: 28d, isRolling: true}]
  budgetingMethod: Occurrences
  objectives: [{targetPercent: 99.9}, {targetPercent: 99.95}]
---
apiVersion: openslo/v1
kind: DataSource
metadata: {name: prometheus}
spec: {type: Prometheus}
"""


def foreign(**changes: str) -> list[Any]:
    text = FOREIGN
    for old, new in changes.values():  # type: ignore[misc]
        assert old in text
        text = text.replace(old, new)
    return list(yaml.safe_load_all(text))


contracts = st.fixed_dictionaries(
    {
        "service_id": st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True),
        "latency_p99_ms": st.floats(100, 1e6), "throughput_rps": st.floats(0.01, 1e6), "availability_sla": st.floats(0.01, 0.99999),
    },
    optional={
        "model": st.text("abc-é", min_size=1, max_size=9), "modality": st.sampled_from(["vision", "text"]), "priority": st.integers(0, 9),
        "accuracy_floor": st.floats(0, 1), "energy_j_per_request": st.floats(0.1, 10), "cost_per_1k_requests": st.floats(0.1, 10),
        "privacy": st.sampled_from(["raw-stays-on-edge", "any"]), "zones": st.lists(st.text("xyz", min_size=1, max_size=4), max_size=3),
        "intent": st.text(max_size=30), "window_days": st.integers(1, 90),
        "objectives": st.just([
            {"percentile": "p50", "at_most_ms": 10.5}, {"percentile": "p95", "at_most_ms": 40, "metric": "time-to-first-token"},
            {"percentile": "p99", "at_most_ms": 9, "metric": "inter-token"},
        ]),
    },
)  # fmt: skip


@given(document=contracts)
def test_a_contract_comes_back_whole_through_yaml(document: dict[str, Any]) -> None:
    contract = contract_from(document)
    text = yaml.safe_dump_all(to_openslo(contract), allow_unicode=True)
    imported = from_openslo(yaml.safe_load_all(text))
    assert contract_from(imported.contract) == contract
    assert imported.notes == ()


def test_annotations_carry_exactly_what_openslo_has_no_field_for() -> None:
    said = {"service_id", "latency_p99_ms", "throughput_rps", "availability_sla", "window_days", "objectives"}
    assert set(ANNOTATED) | said == set(Contract.model_fields)


def test_exported_objects_have_the_shape_of_the_specification() -> None:
    documents = to_openslo(contract_from(EXAMPLES[2]))
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    assert len(names) == len(documents)
    for document in documents:
        assert document["apiVersion"] == "openslo/v1"
        assert len(document["metadata"]["name"]) <= 63
        spec = document["spec"]
        if document["kind"] == "SLO":
            assert ("SLI", spec["indicatorRef"]) in names
            assert all(("AlertPolicy", ref["alertPolicyRef"]) in names for ref in spec["alertPolicies"])
            assert len(spec["objectives"]) == len(spec["timeWindow"]) == 1
            assert spec["budgetingMethod"] in ("Occurrences", "Timeslices")
        if document["kind"] == "AlertPolicy":
            (condition,) = spec["conditions"]
            assert condition["spec"]["condition"]["kind"] == "burnrate"
            assert ("AlertNotificationTarget", spec["notificationTargets"][0]["targetRef"]) in names
    thresholds = [
        d["spec"]["conditions"][0]["spec"]["condition"]["threshold"] for d in documents if d["kind"] == "AlertPolicy"
    ]
    assert thresholds == pytest.approx([13.44, 5.6, 2.8, 0.933333])  # A window of 28 days.


def test_a_foreign_file_is_understood_as_far_as_it_goes() -> None:
    imported = from_openslo(foreign(), given={"throughput_rps": 20})
    assert imported.contract == {
        "service_id": "shop", "latency_p99_ms": 250.0, "throughput_rps": 20.0, "availability_sla": 0.9995, "window_days": 28
    }  # fmt: skip
    assert "shop-latency: the value 250 is read as milliseconds of latency" in imported.notes
    assert any("several availability targets" in note for note in imported.notes)
    assert "prometheus: a DataSource cannot be said" in imported.notes


def test_what_a_contract_needs_and_the_file_lacks_is_named() -> None:
    with pytest.raises(ContractError) as caught:
        from_openslo(foreign())
    assert caught.value.pointer == "/throughput_rps"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("duration: 28d", "duration: 7d"), "different time windows"),
        (("apiVersion: openslo/v1\nkind: Service", "apiVersion: openslo/v1alpha\nkind: Service"), "openslo/v1alpha"),
        (("indicatorRef: shop-latency", "indicatorRef: other"), "no indicator"),
        (("target: 0.99}", "target: 1.5}"), "target of"),
        (("target: 0.99}", "target: yes}"), "no target"),
        (("value: 250, ", ""), "no value"),
        (("objectives: [{op: lte, value: 250, target: 0.99}]", "objectives: []"), "no objectives"),
        (("kind: Service\nmetadata: {name: shop}", "kind: Service\nmetadata: {name: other}"), "speaks of 2 services"),
        (("metadata: {name: prometheus}", "metadata: {}"), "no kind or no name"),
    ],
)
def test_what_makes_no_sense_is_refused(change: tuple[str, str], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        from_openslo(foreign(change=change), given={"throughput_rps": 20})  # type: ignore[arg-type]


def test_what_cannot_be_said_is_noted_and_left_out() -> None:
    documents = foreign(change=("duration: 28d, isRolling: true", "duration: 1M, calendar: {}"))  # type: ignore[arg-type]
    assert any("rolling windows" in note for note in from_openslo(documents, given={"throughput_rps": 1}).notes)
    documents = foreign(change=("target: 0.99}", "target: 0.9}"))  # type: ignore[arg-type]
    imported = from_openslo(documents, given={"throughput_rps": 1, "latency_p99_ms": 7})
    assert any("cannot be said" in note for note in imported.notes)
    assert imported.contract["latency_p99_ms"] == 7


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.just(10**400) | st.text(max_size=8) | st.sampled_from(["openslo/v1", "SLO", "Service"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["apiVersion", "kind", "metadata", "name", "spec", "service", "objectives", "timeWindow", "indicator", "target"]),
        inner, max_size=6),
    max_leaves=12,
)  # fmt: skip


@given(documents=st.lists(json_values, max_size=4), cut=st.integers(0, 40), value=json_values)
def test_no_heap_of_objects_crashes_the_import(documents: list[Any], cut: int, value: Any) -> None:
    broken = to_openslo(contract_from(EXAMPLES[1]))
    target = broken[cut % len(broken)]["spec"]
    target[sorted(target)[cut % len(target)]] = value
    for heap in (documents, broken):
        try:
            contract_from(from_openslo(heap).contract)
        except ContractError as error:
            str(error).encode()


def test_too_many_objects_are_refused() -> None:
    with pytest.raises(ContractError, match="more than"):
        from_openslo([{}] * (MAX_OBJECTS + 1))
