from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decision import Prediction
from policies.score import Weights, score
from sla.contract import contract_from
from sla.errors import SettingsError

CONTRACT = contract_from(
    {"service_id": "s", "latency_p99_ms": 1000, "throughput_rps": 1, "availability_sla": 0.99}
)  # fmt: skip

predictions = st.builds(
    Prediction,
    p50_ms=st.just(1.0), p95_ms=st.just(1.0), p99_ms=st.just(1.0), mean_ms=st.just(1.0), throughput_rps=st.just(1.0),
    saturation=st.floats(0, 1), jitter_ms=st.floats(0, 1e6), risk=st.floats(0, 1), availability=st.just(1.0),
    accuracy=st.just(1.0), energy_j=st.just(1.0), memory_bytes=st.just({}), move_bytes=st.just(0), move_ms=st.just(0.0),
    bottleneck=st.just(""),
)  # fmt: skip


@given(p=predictions)
def test_scores_are_shares(p: Prediction) -> None:
    assert 0.0 <= score(p, CONTRACT) <= 1.0


@given(p=predictions, field=st.sampled_from(["saturation", "jitter_ms", "risk"]), more=st.floats(0, 1))
def test_worse_in_one_respect_never_scores_better(p: Prediction, field: str, more: float) -> None:
    value = getattr(p, field)
    worse = msgspec.structs.replace(p, **{field: value + more if field == "jitter_ms" else min(1.0, value + more)})
    assert score(worse, CONTRACT) >= score(p, CONTRACT) - 1e-12


def test_the_weights_are_those_of_the_design() -> None:
    assert (Weights().saturation, Weights().jitter, Weights().risk) == (0.30, 0.25, 0.45)


@pytest.mark.parametrize("wrong", [{"risk": 0.5}, {"risk": -0.45, "jitter": 1.15}, {"jitter_reference": 0.0}])
def test_weights_that_do_not_add_up_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        Weights(**wrong)
