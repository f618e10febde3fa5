"""Recorded traces for simulations: arrivals, round trips and bandwidth from CSV files, as one value per second."""

from __future__ import annotations

import csv
import gzip
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from policies.scenario import Scenario, Trace
from sla.errors import InvalidInputError

MAX_ROWS = 2_000_000
_DROPPED = 0.5
"""Share of lost probes from which a second counts as an outage."""


def traces_for(scenario: Scenario, directory: Path | None) -> dict[str, Trace]:
    """The traces that a scenario names, as far as they are in the directory; without one, none (they are made up then)."""
    names = [name for name in (scenario.load.trace, scenario.uplink.trace) if name is not None]
    if directory is None:
        return {}
    if not directory.is_dir():
        raise InvalidInputError(f"There is no directory of traces at {directory}.")
    found = {}
    for name in names:
        paths = [p for p in (directory / f"{name}.csv.gz", directory / f"{name}.csv") if p.is_file()]
        if paths:
            found[name] = read_trace(paths[0])
    return found


def read_trace(path: Path) -> Trace:
    """A trace by the columns that it has. Raises InvalidInputError for a file of another kind."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") if path.suffix == ".gz" else path.open() as file:
            rows = list(itertools.islice(csv.DictReader(file), MAX_ROWS))
        columns = set(rows[0]) if rows else set()
        if "drop_rate" in columns:
            return _pings(rows)
        if "rtt_ms" in columns:
            return _round_trips(rows)
        if "dl_kbps" in columns:
            return _bandwidth(rows)
        column = "t_s" if "t_s" in columns else "start_s" if "start_s" in columns else None
        if column is not None:
            return Trace(arrivals_s=np.sort(np.array([float(row[column]) for row in rows])))
    except (OSError, ValueError, csv.Error, EOFError) as error:
        raise InvalidInputError(f"The trace {path.name} cannot be read: {error}.") from None
    raise InvalidInputError(f"The trace {path.name} has none of the columns t_s, rtt_ms, dl_kbps.")


def _pings(rows: Iterable[dict[str, str]]) -> Trace:
    """One row per second: a mean round trip and the share of lost probes."""
    values = [(_number(row["rtt_ms"]), _number(row["drop_rate"]) or 0.0) for row in rows]
    rtt, last = [], 50.0
    for value, _ in values:
        last = value if value is not None and value > 0 else last
        rtt.append(last)
    return Trace(rtt_ms=np.array(rtt), down=np.array([drop >= _DROPPED for _, drop in values]))


def _round_trips(rows: Iterable[dict[str, str]]) -> Trace:
    """Many probes per second in several runs: the mean of each second; a second without any is an outage."""
    rtt: list[float] = []
    down: list[bool] = []
    for _, run in itertools.groupby(rows, key=lambda row: row.get("run", "")):
        seconds = {at: [t for _, t in probes] for at, probes in itertools.groupby(_timed(run), key=lambda p: int(p[0]))}
        for at in range(min(seconds, default=0), max(seconds, default=-1) + 1):
            rtt.append(float(np.mean(seconds[at])) if at in seconds else rtt[-1])
            down.append(at not in seconds)
    return Trace(rtt_ms=np.array(rtt), down=np.array(down, dtype=np.bool_))


def _timed(rows: Iterable[dict[str, str]]) -> Iterator[tuple[float, float]]:
    for row in rows:
        at, rtt = _number(row["t_s"]), _number(row["rtt_ms"])
        if at is not None and rtt is not None:
            yield at, rtt


def _bandwidth(rows: Iterable[dict[str, str]]) -> Trace:
    rate: list[float] = []
    for row in rows:
        value, lasts = _number(row["dl_kbps"]) or 0.0, _number(row.get("duration_ms", "1000")) or 1000.0
        rate += [125.0 * value] * max(1, min(60, round(lasts / 1000)))
    return Trace(bytes_per_s=np.array(rate))


def _number(text: str | None) -> float | None:
    if not text:
        return None
    value = float(text)
    return value if np.isfinite(value) else None
