from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla.contract import MAX_DOCUMENT_BYTES, Contract, parse_contract
from sla.errors import ContractError

SEED = (
    '{"service_id": "api-payment-v2", "latency_p99_ms": 150, "throughput_rps": 8000, "availability_sla": "99.95%"}'
)  # fmt: skip
GOOD = json.loads(SEED)

json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def test_the_seed_contract_is_accepted_as_it_is() -> None:
    contract = parse_contract(SEED)
    assert contract.service_id == contract.service_name == "api-payment-v2"
    assert contract.latency_p99_ms == 150
    assert contract.throughput_rps == 8000
    assert contract.availability_sla == pytest.approx(0.9995)
    assert contract.window_days == 7


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"latency_p99_ms": -1}, "/latency_p99_ms"),
        ({"latency_p99_ms": "150"}, "/latency_p99_ms"),
        ({"latency_p99_ms": True}, "/latency_p99_ms"),
        ({"throughput_rps": 0}, "/throughput_rps"),
        ({"availability_sla": 99.95}, "/availability_sla"),
        ({"availability_sla": "99,95 %"}, "/availability_sla"),
        ({"availability_sla": "100%"}, "/availability_sla"),
        ({"service_id": "Not A Name"}, "/service_id"),
        ({"privacy": "secret"}, "/privacy"),
        ({"accuracy_floor": 1.5}, "/accuracy_floor"),
        ({"zones": ["a", 3]}, "/zones/1"),
        ({"window_days": 0}, "/window_days"),
        ({"latency_ms": 5}, "/latency_ms"),
        ({"a/b~c": 5}, "/a~1b~0c"),
    ],
)
def test_errors_point_at_the_field(changes: dict[str, object], pointer: str) -> None:
    with pytest.raises(ContractError) as caught:
        parse_contract(json.dumps({**GOOD, **changes}))
    assert caught.value.pointer == pointer
    assert caught.value.found
    assert caught.value.accepted


@pytest.mark.parametrize("field", ["service_id", "latency_p99_ms", "throughput_rps", "availability_sla"])
def test_missing_fields_are_named(field: str) -> None:
    with pytest.raises(ContractError) as caught:
        parse_contract(json.dumps({k: v for k, v in GOOD.items() if k != field}))
    assert caught.value.pointer == f"/{field}"


@pytest.mark.parametrize(
    "document",
    ["", "{", "[]", "null", "NaN", '"x"', SEED[:-1] + ', "latency_p99_ms": 1}', SEED.replace("150", "NaN"),
     SEED.replace("150", "1e400"), "[" * 10_000, b"\xff\xfe", " " * (MAX_DOCUMENT_BYTES + 1)],
)  # fmt: skip
def test_what_is_no_contract_is_refused(document: str | bytes) -> None:
    with pytest.raises(ContractError):
        parse_contract(document)


@given(field=st.sampled_from([*Contract.model_fields, "other"]), value=json_values)
def test_any_value_is_accepted_or_refused_with_a_pointer(field: str, value: object) -> None:
    try:
        contract = parse_contract(json.dumps({**GOOD, field: value}))
    except ContractError as error:
        if error.pointer:
            assert error.pointer.split("/")[1] == field  # noqa: PT017 - both outcomes are right
        return
    assert parse_contract(contract.model_dump_json()) == contract


@given(document=st.text(max_size=200) | st.binary(max_size=200))
def test_any_document_is_parsed_or_refused(document: str | bytes) -> None:
    with pytest.raises(ContractError):
        parse_contract(document)


@given(share=st.floats(0.001, 0.999999))
def test_shares_may_be_written_as_fractions(share: float) -> None:
    assert parse_contract(json.dumps({**GOOD, "availability_sla": share})).availability_sla == share
