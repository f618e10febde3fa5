"""`tidegate simulate`: plays a scenario under one or more policies, prints what came of it, and draws it."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from controller.simulate_drawing import draw
from controller.simulate_fleet import FleetResult, play_fleet
from controller.simulate_picture import picture
from controller.simulate_traces import traces_for
from policies.scenario import Scenario, Trace, World, scenario_from, world_of
from policies.simulate_choosers import CHOOSERS, simulate_policy
from policies.simulate_results import Result
from sla.errors import InvalidInputError

BUILT_IN = Path(__file__).parent / "scenarios"
MAX_FILE_BYTES = 1 << 20


def run_simulate(arguments: argparse.Namespace) -> int:
    """The command. Status 0 whatever comes of it."""
    if arguments.list:
        for path in sorted(BUILT_IN.glob("*.toml")):
            print(f"{path.stem:20} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        return 0
    if arguments.scenario is None:
        raise InvalidInputError("Name a scenario file, or one of those that --list shows.")
    scenario = load_scenario(arguments.scenario)
    if arguments.seconds is not None:
        scenario = scenario_from({**msgspec.to_builtins(scenario), "seconds": arguments.seconds})
    if arguments.agents is not None:
        zones = -(-arguments.agents // len(scenario.devices))
        scenario = scenario_from({**msgspec.to_builtins(scenario), "zones": zones})
    directory = arguments.traces or os.environ.get("TIDEGATE_TRACES")
    traces = traces_for(scenario, Path(directory) if directory else None)
    if scenario.zones > 1:
        return _run_fleet(arguments, scenario, traces)
    world = world_of(scenario, arguments.seed, traces)
    results = {name: simulate_policy(name, world, arguments.seed) for name in chosen_policies(arguments.policy)}
    if arguments.svg is not None:
        Path(arguments.svg).write_text(draw(world, results), encoding="utf-8")
    if arguments.png is not None:
        Path(arguments.png).write_bytes(picture(world, results))
    if arguments.json:
        print(json.dumps({name: as_row(result) for name, result in results.items()}, indent=2))
    else:
        Console().print(table_of(world, results))
    return 0


def _run_fleet(arguments: argparse.Namespace, scenario: Scenario, traces: Mapping[str, Trace]) -> int:
    if arguments.svg is not None or arguments.png is not None:
        raise InvalidInputError("A fleet of many zones is not drawn; draw one zone of it with --agents 1.")
    results = {name: play_fleet(scenario, name, arguments.seed, traces) for name in chosen_policies(arguments.policy)}
    if arguments.json:
        print(json.dumps({name: msgspec.to_builtins(result) for name, result in results.items()}, indent=2))
    else:
        Console().print(fleet_table(scenario, results))
    return 0


def fleet_table(scenario: Scenario, results: Mapping[str, FleetResult]) -> Table:
    """A table for people of a fleet's results."""
    some = next(iter(results.values()))
    title = f"{scenario.name}: {some.agents} agents in {some.zones} zones, {scenario.seconds / 3600:.2g} h each"
    table = Table(title=title, title_justify="left")
    columns = ("policy", "zone-minutes violated", "requests", "failed", "p99 ms", "moves/h per zone", "took s", "CPU s")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, r in results.items():
        table.add_row(
            name, f"{r.violation_minutes} of {r.minutes}", str(r.requests), str(r.failed), f"{r.p99_ms:.0f}",
            f"{r.moves_per_hour:.2f}", f"{r.wall_s:.0f}", f"{r.cpu_s:.0f}",
        )  # fmt: skip
    return table


def load_scenario(name: str) -> Scenario:
    """A scenario from a file, or a built-in one by its name. Raises InvalidInputError."""
    path = Path(name)
    if not path.suffix and not path.exists():
        path = BUILT_IN / f"{name}.toml"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInputError(f"{name} is larger than a scenario may be ({MAX_FILE_BYTES} bytes).")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(p.stem for p in BUILT_IN.glob("*.toml")))
        raise InvalidInputError(f"There is no scenario {name!r}; built in are {known}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{name} is not TOML: {error}.") from None
    return scenario_from(document)


def chosen_policies(text: str) -> list[str]:
    """The policies in a comma-separated list. Raises InvalidInputError."""
    names = list(CHOOSERS) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in CHOOSERS]
    if unknown:
        raise InvalidInputError(f"There is no policy {unknown[0]!r}; there are {', '.join(CHOOSERS)} (or: all).")
    return names


def as_row(result: Result) -> dict[str, float]:
    """The figures of one result."""
    return {
        "violation_minutes": result.violation_minutes, "minutes": len(result.minutes), "requests": result.requests,
        "failed": result.failed, "p50_ms": result.p50_ms, "p99_ms": result.p99_ms, "energy_j": result.energy_j,
        "moves": result.moves, "moves_per_hour": result.moves_per_hour,
    }  # fmt: skip


def table_of(world: World, results: Mapping[str, Result]) -> Table:
    """A table for people, with the ratio to the oracle if it took part."""
    title = f"{world.scenario.name}: {world.seconds / 3600:.2g} h, {len(world.arrivals_ms)} requests, p99 of {world.contract.latency_p99_ms:g} ms promised"
    table = Table(title=title, title_justify="left")
    columns: Sequence[str] = (
        "policy",
        "minutes violated",
        "to the oracle",
        "failed",
        "p50 ms",
        "p99 ms",
        "J/request",
        "moves/h",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    best = results["oracle"].violation_minutes if "oracle" in results else None
    for name, r in results.items():
        ratio = (
            "-"
            if best is None
            else f"{r.violation_minutes / best:.2g}"
            if best
            else ("1" if not r.violation_minutes else "inf")
        )
        table.add_row(
            name, f"{r.violation_minutes} of {len(r.minutes)}", ratio, str(r.failed), f"{r.p50_ms:.0f}", f"{r.p99_ms:.0f}",
            f"{r.energy_j:.1f}", f"{r.moves_per_hour:.1f}",
        )  # fmt: skip
    return table
