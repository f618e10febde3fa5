"""Facts and probes: bounded, whatever a driver prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.facts import calibrated_slowdown, device_facts, measure_gflops, safe_name
from agents.probes import DeviceProbe, foreign_saturation, parse_millidegrees, parse_npu_load
from policies.platforms import platform


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("NPU load:  Core0: 21%, Core1: 11%, Core2:  0%,\n", (0.21, 0.11, 0.0)),
        ("NPU load:  0%\n", (0.0,)),
        ("NPU load:  100%", (1.0,)),
        ("NPU load:  Core0: 429496%, Core1:  0%, Core2:  0%,", None),
        ("NPU load:  429496%", None),
        ("NPU load:", None),
        ("", None),
        ("NPU load: -3%", None),
        ("NPU load: " + "Core0: 1%, " * 17, None),
    ],
)
def test_the_npu_load_file(text, loads):
    assert parse_npu_load(text) == loads


@given(st.text(max_size=100))
def test_no_text_gives_a_load_out_of_bounds(text):
    loads = parse_npu_load(text)
    assert loads is None or all(0 <= load <= 1 for load in loads)


@pytest.mark.parametrize(
    ("text", "celsius"), [("45500\n", 45.5), ("-5000", -5.0), ("999999", None), ("", None), ("hot", None)]
)
def test_temperatures(text, celsius):
    assert parse_millidegrees(text) == celsius


def board(directory: Path, load: str) -> DeviceProbe:
    for index, (kind, temperature) in enumerate((("soc-thermal", "99000"), ("npu-thermal", "51000"))):
        zone = directory / f"thermal_zone{index}"
        zone.mkdir(exist_ok=True)
        (zone / "type").write_text(kind)
        (zone / "temp").write_text(temperature)
    (directory / "load").write_text(load)
    return DeviceProbe(
        emulated=False, busy_share=lambda: 0.0, free_budget_bytes=lambda: 1000, npu_load_file=directory / "load", thermal_zones=directory,
    )  # fmt: skip


def test_a_board_is_read_and_a_bad_reading_is_dropped_and_counted(tmp_path):
    probe = board(tmp_path, "NPU load:  Core0: 21%, Core1: 11%, Core2:  0%,")
    readings = probe.read()
    assert (readings.npu_load, readings.temperature_c, readings.memory_free_bytes) == ((0.21, 0.11, 0.0), 51.0, 1000)
    assert 0 <= readings.cpu_saturation <= 1
    (tmp_path / "load").write_text("NPU load:  Core0: 429496%, Core1: 0%, Core2: 0%,")
    assert probe.read().npu_load == ()
    assert probe.bad_readings == 1


def test_an_emulated_device_says_nothing_of_the_host(tmp_path):
    probe = DeviceProbe(emulated=True, busy_share=lambda: 0.75, free_budget_bytes=lambda: 5)
    readings = probe.read()
    assert (readings.cpu_saturation, readings.foreign_saturation) == (0.75, 0.0)
    assert (readings.cpu_saturation, readings.npu_load, readings.temperature_c, readings.memory_free_bytes) == (
        0.75,
        (),
        None,
        5,
    )


def test_the_facts_of_an_emulated_device_are_those_of_its_platform():
    imx93 = platform("imx93")
    facts = device_facts(
        imx93,
        emulate=True,
        zone="hall 1",
        is_cloud=False,
        claimed_host="10.0.0.1",
        peer_port=1,
        ingress_port=2,
    )
    assert (facts.evidence, facts.slowdown, facts.memory_budget_bytes) == (
        "emulated",
        imx93.emulated_slowdown,
        imx93.emulated_budget_bytes,
    )
    assert (facts.hostname, facts.zone, facts.providers) == ("imx93", "hall-1", ("emulated",))
    assert len(facts.fingerprint) == 64


@given(st.text(max_size=100))
def test_names_are_always_acceptable(name):
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", safe_name(name))


def test_the_calibration_is_relative_and_bounded():
    assert measure_gflops(rounds=2) > 0
    assert calibrated_slowdown(lambda: 31.5) == pytest.approx(2.0)
    assert calibrated_slowdown(lambda: 0.0) == 50.0
    assert calibrated_slowdown(lambda: 1e9) == 0.1


@pytest.mark.parametrize(
    ("total", "own", "threads", "cores", "foreign"),
    [
        (0.5, 1.0, 1, 2, 0.0),  # one of two cores is busy, and it is us
        (1.0, 1.0, 1, 2, 0.0),  # others use the core that we leave
        (1.0, 0.5, 1, 2, 0.5),  # others take half of what we need
        (1.0, 0.0, 1, 1, 1.0),
        (0.25, 0.0, 4, 4, 0.25),
        (0.1, 0.9, 1, 2, 0.0),  # readings of different moments never give a negative share
    ],
)
def test_only_what_keeps_our_shards_from_running_is_foreign(total, own, threads, cores, foreign):
    assert foreign_saturation(total, own, threads=threads, cores=cores) == pytest.approx(foreign)
