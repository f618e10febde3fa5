"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.common import Row, print_rows, rows_as_json
from sla.errors import TidegateError

NAMES = (
    "control",
    "cutting",
    "hedging",
    "hop",
    "llm",
    "policies",
    "prediction",
    "prediction_live",
    "sharding",
    "sla",
    "solver",
    "startup",
)
"""Each is a module of this package with `run(quick: bool) -> list[Row]`."""


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 if every goal holds, 1 if one does not, 2 if a benchmark cannot run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Tidegate on this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(NAMES)}; all if none is given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    parser.add_argument("--quick", action="store_true", help="fewer runs, for a first impression")
    parser.add_argument("--base-url", metavar="URL", help="of the model that `llm` measures, OpenAI-compatible")
    parser.add_argument("--model", help="its name there")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="where `policies` draws a PNG per scenario")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark named {unknown[0]!r}; there are {', '.join(NAMES)}")
    console = Console(stderr=False)
    rows: list[Row] = []
    for name in chosen.names or NAMES:
        options = {
            "llm": {"base_url": chosen.base_url, "model": chosen.model},
            "policies": {"pictures": chosen.pictures},
        }.get(name, {})
        try:
            found = importlib.import_module(f"benchmarks.{name}").run(quick=chosen.quick, **options)
        except TidegateError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 2
        print_rows(name, found, console)
        rows.extend(found)
        if chosen.json is not None:
            chosen.json.write_bytes(
                rows_as_json(rows)
            )  # after each, so that an interrupted run leaves what it measured
    return 1 if any(row.holds is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
