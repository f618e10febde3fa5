"""The past counts: the worst of the last minutes, loads that are no chance, and devices that were left because they were slow."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.beliefs import Beliefs, CautionSettings, Level, cautious, learned, likely_rps, ratio_left
from policies.fleet import LinkView
from policies.ids import AgentId, ServiceId
from policies.snapshot import Snapshot
from sla.errors import SettingsError

READER = ServiceId("document-reader")
KEY = "ascend>cloud"
SETTINGS = CautionSettings()
Demo = Callable[..., Snapshot]


def at(snapshot: Snapshot, now_ms: float, **link: float) -> Snapshot:
    links = {**snapshot.fleet.links, KEY: msgspec.structs.replace(snapshot.fleet.links[KEY], **link)}
    return msgspec.structs.replace(snapshot, now_ms=now_ms, fleet=msgspec.structs.replace(snapshot.fleet, links=links))


def after(looks: list[Snapshot], settings: CautionSettings = SETTINGS) -> Beliefs:
    beliefs = Beliefs()
    for snapshot in looks:
        beliefs = learned(beliefs, snapshot, READER, {}, settings)
    return beliefs


def seen(beliefs: Beliefs, snapshot: Snapshot) -> LinkView:
    return cautious(snapshot, READER, beliefs, {}, SETTINGS).fleet.links[KEY]


def test_a_link_counts_as_bad_as_it_was_until_it_was_good_for_the_whole_window(demo: Demo) -> None:
    bad = [at(demo(), 1_000.0 * n, rtt_ms=400.0, bandwidth_bytes_per_s=1e5) for n in range(3)]
    good = [at(demo(), 1_000.0 * n) for n in range(3, 400)]
    during = after(bad + good[:200])
    assert seen(during, good[200]).rtt_ms == 400.0
    assert seen(during, good[200]).bandwidth_bytes_per_s == 1e5
    last = good[-1]
    assert seen(after(bad + good), last) == last.fleet.links[KEY]


def test_one_odd_look_is_not_remembered(demo: Demo) -> None:
    looks = [at(demo(), 0.0), at(demo(), 1_000.0, rtt_ms=900.0), at(demo(), 2_000.0)]
    assert seen(after(looks), looks[-1]).rtt_ms == looks[-1].fleet.links[KEY].rtt_ms


@given(rtts=st.lists(st.floats(1.0, 1e4), min_size=1, max_size=30), rates=st.lists(st.floats(1e3, 1e8), min_size=30))
def test_with_the_past_in_mind_nothing_looks_better_than_it_is(
    demo: Demo, rtts: list[float], rates: list[float]
) -> None:
    looks = [
        at(demo(), 7_000.0 * n, rtt_ms=rtt, jitter_ms=rtt / 7, bandwidth_bytes_per_s=rates[n])
        for n, rtt in enumerate(rtts)
    ]
    now, link = looks[-1].fleet.links[KEY], seen(after(looks), looks[-1])
    assert link.rtt_ms >= now.rtt_ms
    assert link.jitter_ms >= now.jitter_ms
    assert link.bandwidth_bytes_per_s <= now.bandwidth_bytes_per_s
    assert link.rtt_ms <= max(rtts)
    assert len(after(looks).links[KEY]) <= SETTINGS.steps


def test_without_a_window_only_now_counts(demo: Demo) -> None:
    none = CautionSettings(window_ms=0.0)
    looks = [at(demo(), 1_000.0 * n, rtt_ms=400.0) for n in range(5)]
    calm = at(demo(), 6_000.0)
    assert cautious(calm, READER, after(looks, none), {}, none) is calm


def test_a_load_counts_as_risen_when_chance_does_not_explain_it() -> None:
    usual = (Level(0, 60 * 1.5, 60), Level(1, 60 * 1.5, 60))
    assert likely_rps(2.4, usual, SETTINGS) == 1.5
    assert likely_rps(4.0, usual, SETTINGS) == 4.0
    assert likely_rps(1.0, (Level(0, 60 * 4.0, 60), *usual), SETTINGS) == 4.0, "a crowd is expected back for a while"
    assert likely_rps(2.0, (), SETTINGS) == 2.0


def test_a_device_that_was_left_because_it_was_slow_stays_slow_for_a_while(demo: Demo) -> None:
    name = AgentId("ascend")
    beliefs = Beliefs()
    for n in range(60):
        beliefs = learned(beliefs, at(demo(), 1_000.0 * n), READER, {name: (1.4, 0.5)}, SETTINGS)
    assert beliefs.slowed[name].log_ratio == pytest.approx(1.4, abs=0.01)
    left = at(demo(), 59_000.0 + SETTINGS.slow_half_life_ms)
    beliefs = learned(beliefs, left, READER, {}, SETTINGS)
    assert ratio_left(beliefs.slowed[name], left.now_ms, SETTINGS) == pytest.approx(0.7, abs=0.01)
    assert cautious(left, READER, beliefs, {}, SETTINGS).fleet.agents[name].booked.weight > 100
    again = learned(beliefs, left, READER, {name: (0.0, 0.9)}, SETTINGS)
    assert name not in again.slowed, "it was measured to be quick again"


@pytest.mark.parametrize("wrong", [{"window_ms": -1.0}, {"steps": 0}, {"slow_half_life_ms": 0.0}])
def test_settings_without_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        CautionSettings(**wrong)  # type: ignore[arg-type]
