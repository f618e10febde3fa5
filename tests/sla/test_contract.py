from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sla
from sla.contract import MAX_DOCUMENT_BYTES, Contract, parse_contract, percent
from sla.errors import ContractError
from sla.refusals import ACCEPTED
from sla.schema import EXAMPLES, contract_schema, schema_text

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
        ({"availability_sla": True}, "/availability_sla"),
        ({"availability_sla": 10**400}, "/availability_sla"),
        ({"availability_sla": None}, "/availability_sla"),
        ({"latency_p99_ms": 10**400}, "/latency_p99_ms"),
        ({"latency_p99_ms": 1e10}, "/latency_p99_ms"),
        ({"latency_p99_ms": [150]}, "/latency_p99_ms"),
        ({"priority": 5.0}, "/priority"),
        ({"priority": True}, "/priority"),
        ({"window_days": "7"}, "/window_days"),
        ({"zones": "plant"}, "/zones"),
        ({"zones": ["z"] * 65}, "/zones"),
        ({"zones": [""]}, "/zones/0"),
        ({"intent": "x" * 501}, "/intent"),
        ({"intent": 7}, "/intent"),
        ({"intent": "\ud800"}, "/intent"),
        ({"\ud800": 7}, "/\\ud800"),
        ({"model": ""}, "/model"),
        ({"objectives": {"p95": 100}}, "/objectives"),
        ({"objectives": [100]}, "/objectives/0"),
        ({"objectives": [{"percentile": "p95"}]}, "/objectives/0/at_most_ms"),
        ({"objectives": [{"percentile": "p90", "at_most_ms": 1}]}, "/objectives/0/percentile"),
        ({"objectives": [{"percentile": "p95", "at_most_ms": "1"}]}, "/objectives/0/at_most_ms"),
        ({"objectives": [{"percentile": "p95", "at_most_ms": 1, "unit": "s"}]}, "/objectives/0/unit"),
        ({"objectives": [{"percentile": "p99", "at_most_ms": 1}]}, "/objectives/0"),
        (
            {"objectives": [{"percentile": "p95", "at_most_ms": 1}, {"percentile": "p95", "at_most_ms": 2}]},
            "/objectives/1",
        ),
        ({"objectives": [{"percentile": "p95", "at_most_ms": 151}]}, "/objectives/0/at_most_ms"),
        ({"objectives": [{"percentile": "p50", "at_most_ms": 9}] * 17}, "/objectives"),
    ],
)
def test_errors_point_at_the_field(changes: dict[str, object], pointer: str) -> None:
    with pytest.raises(ContractError) as caught:
        parse_contract(json.dumps({**GOOD, **changes}))
    assert caught.value.pointer == pointer
    assert caught.value.found
    assert caught.value.accepted
    assert str(caught.value).endswith(".")
    for text in (str(caught.value), caught.value.pointer, caught.value.found, caught.value.accepted):
        text.encode()


def test_hints_name_what_was_probably_meant() -> None:
    with pytest.raises(ContractError, match=r'did you mean "99\.95%"'):
        parse_contract(json.dumps({**GOOD, "availability_sla": 99.95}))
    with pytest.raises(ContractError, match="did you mean 'throughput_rps'"):
        parse_contract(json.dumps({**GOOD, "troughput_rps": 1}))


@pytest.mark.parametrize(
    ("document", "pointer"),
    [
        (SEED[:-1] + ', "objectives": [{"percentile": "p50", "at_most_ms": 1, "percentile": "p95"}]}', "/objectives/0/percentile"),
        (SEED[:-1] + ', "objectives": [{}, {"a": {"b/": 1, "b/": 2}}]}', "/objectives/1/a/b~1"),
        (SEED[:-1] + ', "latency_p99_ms": 150}', "/latency_p99_ms"),
        ('{"": 1, "": 2}', "/"),
    ],
)  # fmt: skip
def test_doubled_keys_are_found_at_any_depth(document: str, pointer: str) -> None:
    with pytest.raises(ContractError, match="twice") as caught:
        parse_contract(document)
    assert caught.value.pointer == pointer


def test_every_field_says_what_it_accepts() -> None:
    names = {*Contract.model_fields, *(f"objectives/{name}" for name in ("percentile", "at_most_ms", "metric"))}
    assert set(ACCEPTED) == names


def test_the_published_schema_is_current() -> None:
    published = Path(sla.__file__).parent / "schema.json"
    assert published.read_text() == schema_text(), "run: python -m sla.schema > sla/schema.json"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example["service_id"]))
def test_examples_are_accepted_and_are_what_the_files_say(example: dict[str, Any]) -> None:
    file = Path(sla.__file__).parent / "examples" / f"{example['service_id']}.json"
    assert json.loads(file.read_text()) == example
    parse_contract(file.read_bytes())
    jsonschema.validate(example, contract_schema())


@given(field=st.sampled_from([*Contract.model_fields, "other"]), value=json_values)
def test_what_the_parser_accepts_the_schema_accepts_too(field: str, value: object) -> None:
    document = {**GOOD, field: value}
    try:
        parse_contract(json.dumps(document))
    except ContractError:
        return
    jsonschema.validate(document, contract_schema())


@given(share=st.integers(1, 999_999))
def test_shares_are_written_without_loss(share: int) -> None:
    written = percent(share / 1e6)
    assert parse_contract(json.dumps({**GOOD, "availability_sla": written})).availability_sla == pytest.approx(
        share / 1e6
    )


def test_ten_thousand_broken_documents_never_crash() -> None:
    chance = random.Random(3)
    texts = [json.dumps(example, ensure_ascii=False) for example in EXAMPLES]
    pieces = [
        "{",
        "}",
        "[",
        "]",
        '"',
        ",",
        ":",
        "null",
        "true",
        "1e999",
        "-0",
        "NaN",
        "\\ud800",
        "\x00",
        "99.95%",
        "{}",
        '"p95"',
        "9" * 5000,
    ]
    refused = 0
    for _ in range(10_000):
        text = chance.choice(texts)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(text))
            match chance.randrange(4):
                case 0:
                    text = text[:at] + text[at + chance.randint(1, 8) :]
                case 1:
                    text = text[:at] + chance.choice(pieces) + text[at:]
                case 2:
                    text = text[:at] + chr(chance.randrange(0x2FF)) + text[at + 1 :]
                case _:
                    other = chance.randrange(len(text))
                    text = text[:at] + text[min(at, other) : max(at, other)] + text[at:]
        try:
            parse_contract(text.encode(errors="surrogatepass"))
        except ContractError as error:
            refused += 1
            json.dumps([str(error), error.pointer, error.found, error.accepted], ensure_ascii=False).encode()
    assert refused > 9_000


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
