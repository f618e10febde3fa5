"""How an emulated device is told how slow it is."""

from __future__ import annotations

import pytest

from agents.settings import parse_arguments
from sla.errors import SettingsError

JOIN = ("--controller", "127.0.0.1:1", "--platform", "rk3588")


def test_an_emulated_device_may_be_slower_than_its_platform() -> None:
    assert parse_arguments([*JOIN, "--emulate", "--slowdown", "7.5"]).device.platform.emulated_slowdown == 7.5
    assert parse_arguments([*JOIN, "--emulate"]).device.platform.emulated_slowdown == 2.2


def test_a_real_device_is_measured_not_told() -> None:
    with pytest.raises(SettingsError, match="measured"):
        parse_arguments([*JOIN, "--slowdown", "7.5"])


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x", "1e9"])
def test_a_slowdown_that_makes_no_sense_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([*JOIN, "--emulate", "--slowdown", text])
    assert "is not a number from 0.01 to 1000" in capsys.readouterr().err
