"""What every benchmark shares: its rows, their table, and measuring ways side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One result; the keys of the JSON output are stable."""

    name: str
    value: float
    """A median."""
    unit: str
    goal: str | None = None
    """What `value` should be, e.g. `<= 1.05`."""
    holds: bool | None = None
    """None where there is no goal."""
    runs: int = 1
    note: str = ""


def at_most(name: str, value: float, unit: str, limit: float, *, runs: int, note: str = "") -> Row:
    """A row whose goal is `value <= limit`."""
    return Row(name=name, value=value, unit=unit, goal=f"<= {limit:g}", holds=value <= limit, runs=runs, note=note)


def side_by_side(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each way in each round; the ways take turns, in an order that rotates, so that noise meets all of them alike.

    With `time.thread_time` as the clock what others do on the machine is left out; for work that stays in the calling thread.
    """
    names = list(ways)
    for name in names:
        ways[name]()  # touches memory and caches for the first time
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            began_s = clock()
            ways[name]()
            times[name].append(clock() - began_s)
    return times


def median_ratio(times_s: Sequence[float], reference_s: Sequence[float]) -> float:
    """Median over the rounds of one way's time to the other's in the same round."""
    return statistics.median(one / other for one, other in zip(times_s, reference_s, strict=True))


def print_rows(title: str, rows: Sequence[Row], console: Console) -> None:
    """A table for people."""
    table = Table(title=title, title_justify="left")
    for heading in ("what", "value", "unit", "goal", "holds", "runs", "note"):
        table.add_column(heading, justify="right" if heading in ("value", "runs") else "left")
    marks = {None: "", True: "yes", False: "[red]no[/red]"}
    for row in rows:
        table.add_row(row.name, f"{row.value:.4g}", row.unit, row.goal or "", marks[row.holds], str(row.runs), row.note)
    console.print(table)


def rows_as_json(rows: Sequence[Row]) -> bytes:
    """The rows as a JSON list."""
    return msgspec.json.format(msgspec.json.encode(list(rows)), indent=1) + b"\n"
