from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from controller.cli import main
from controller.simulate_cli import BUILT_IN, load_scenario
from controller.simulate_traces import read_trace
from sla.errors import InvalidInputError


def test_the_built_in_scenarios_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.stem for path in BUILT_IN.glob("*.toml"))
    assert len(names) >= 5
    assert all(load_scenario(name).name == name for name in names)
    assert main(["simulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names)


def test_a_scenario_is_played_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, image = tmp_path / "p.svg", tmp_path / "p.png"
    command = [
        "simulate",
        "flash-crowd",
        "--seconds",
        "60",
        "--policy",
        "static,cloud-only",
        "--svg",
        str(picture),
        "--png",
        str(image),
        "--json",
    ]
    assert main(command) == 0
    rows = json.loads(capsys.readouterr().out)
    assert set(rows) == {"static", "cloud-only"}
    assert rows["static"]["requests"] == rows["cloud-only"]["requests"] > 10
    assert picture.read_text().startswith("<svg")
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size < 150_000


def test_zones_are_played_side_by_side_and_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "fleet", "--agents", "200", "--seconds", "60", "--policy", "static", "--json"]
    assert main(command) == 0
    row = json.loads(capsys.readouterr().out)["static"]
    assert (row["zones"], row["agents"], row["minutes"]) == (2, 200, 2)
    assert row["requests"] > 20


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["simulate", "fleet", "--agents", "200", "--seconds", "60", "--png", "x.png"], "not drawn"),
        (["simulate", "no-such"], "no scenario"),
        (["simulate"], "--list"),
        (["simulate", "flash-crowd", "--policy", "magic"], "no policy"),
        (["simulate", "flash-crowd", "--traces", "/no/such"], "no directory"),
    ],
)
def test_a_wrong_command_is_one_sentence(command: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_traces_are_read_by_their_columns(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("t_s,rtt_ms,drop_rate\n0,30,0\n1,,1\n2,40,0\n")
    pings = read_trace(tmp_path / "a.csv.gz")
    assert pings.rtt_ms is not None
    assert pings.down is not None
    assert pings.rtt_ms.tolist() == [30, 30, 40]
    assert pings.down.tolist() == [False, True, False]
    (tmp_path / "b.csv").write_text("run,t_s,rtt_ms\nx,0.1,20\nx,0.6,40\nx,3.0,50\n")
    probes = read_trace(tmp_path / "b.csv")
    assert probes.rtt_ms is not None
    assert probes.down is not None
    assert probes.rtt_ms.tolist() == [30, 30, 30, 50]
    assert probes.down.tolist() == [False, True, True, False]
    (tmp_path / "c.csv").write_text("trace,t_ms,duration_ms,dl_kbps\nx,0,2000,800\n")
    rates = read_trace(tmp_path / "c.csv").bytes_per_s
    assert rates is not None
    assert rates.tolist() == [100_000, 100_000]
    (tmp_path / "d.csv").write_text("colour\nred\n")
    with pytest.raises(InvalidInputError, match="none of the columns"):
        read_trace(tmp_path / "d.csv")
