"""Commands about services and their knobs: what can be turned while requests run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from controller.commands import api_of, show
from sla.errors import InvalidInputError, NotFoundError

_COLUMNS = ("knob", "value", "set by", "from", "to", "accuracy floor allows", "memory bandwidth used (estimated)")


def service_list(arguments: argparse.Namespace) -> int:
    services = api_of(arguments).get("/v1/services")
    rows = [(s["id"], " -> ".join(stage["name"] for stage in s["stages"]), _knobs_text(s["knobs"])) for s in services]
    return show(arguments, services, ("service", "stages", "knobs"), rows)


def service_tune(arguments: argparse.Namespace) -> int:
    wanted = dict(_assignment(text) for text in arguments.knobs)
    knobs = api_of(arguments).post(f"/v1/services/{arguments.service}:tune", json=wanted)
    for knob in knobs:
        if knob["key"] in wanted:
            follows = ", and follows the memory bandwidth" if knob["auto"] else ""
            print(f"{knob['key']} is {knob['value']:g} for new requests{follows}; nothing was loaded again.")
    return 0


def service_show(arguments: argparse.Namespace) -> int:
    services = api_of(arguments).get("/v1/services")
    service = next((each for each in services if each["id"] == arguments.service), None)
    if service is None:
        raise NotFoundError(f"There is no service {arguments.service!r}; list them with: tidegate service list")
    if arguments.json:
        print(json.dumps(service, indent=2))
        return 0
    print(f"{service['id']}: {' -> '.join(stage['name'] for stage in service['stages'])}")
    for title in ("inputs", "outputs"):
        print(f"{title}: {', '.join(_tensor_text(tensor) for tensor in service[title])}")
    if not service["knobs"]:
        print("It has no knobs.")
        return 0
    return show(arguments, service, _COLUMNS, [_row(knob) for knob in service["knobs"]])


def _knobs_text(knobs: Sequence[dict[str, Any]]) -> str:
    """All knobs of a service in one cell."""
    return ", ".join(f"{k['key']}={k['value']:.3g}{' (auto)' if k['auto'] else ''}" for k in knobs) or "-"


def _row(knob: dict[str, Any]) -> tuple[str, ...]:
    use = knob["bandwidth_use"]
    allowed = (knob["limit"], knob["high"]) if knob["better"] == "high" else (knob["low"], knob["limit"])
    return (
        knob["key"], f"{knob['value']:.3g}", "auto" if knob["auto"] else "operator or default", f"{knob['low']:g}",
        f"{knob['high']:g}", f"{allowed[0]:.3g} to {allowed[1]:.3g}", "-" if use is None else f"{100 * use:.0f} %",
    )  # fmt: skip


def _tensor_text(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} {tensor['datatype']}{list(tensor['shape'])}"


def _assignment(text: str) -> tuple[str, float | str]:
    key, _, value = text.partition("=")
    if key and value == "auto":
        return key, value
    try:
        return key, float(value)
    except ValueError:
        raise InvalidInputError(
            f"{text!r} turns no knob; write STAGE.KNOB=NUMBER or STAGE.KNOB=auto.",
            found=text[:80],
            accepted="decode.keep=0.6",
        ) from None
