"""What the commands about contracts print: previews, budgets and alerts, reports, OpenSLO."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from controller.commands import api_of, number_text, percent_text, read_file, show
from sla.contract import MAX_DOCUMENT_BYTES, contract_from
from sla.errors import ContractError, InvalidInputError
from sla.openslo import UNSAID_HERE, UNSAID_THERE, to_openslo
from sla.openslo_reader import from_openslo

MAX_YAML_BYTES = 4 * MAX_DOCUMENT_BYTES
MAX_YAML_DEPTH = 50


def sla_preview(arguments: argparse.Namespace) -> int:
    admission = api_of(arguments).post("/v1/slas:preview", body=read_file(arguments.file), timeout_s=60)
    if arguments.json:
        print(json.dumps(admission, indent=2))
    else:
        print("\n".join(preview_lines(admission)))
    return 0 if admission["verdict"] != "infeasible" else 1


def preview_lines(admission: dict[str, Any]) -> list[str]:
    """The answer to a contract, for people."""
    if admission["verdict"] != "infeasible":
        lines = [admission["text"]]
        if admission["p99_low_ms"] is not None:
            lines.append(
                f"  p99 between {admission['p99_low_ms']:.0f} and {admission['p99_high_ms']:.0f} ms in four of five cases"
            )
            lines.append(
                f"  energy {admission['prediction']['energy_j']:.3g} J a request, cost {admission['cost_per_1k_requests']:.3g} per 1,000 requests (estimate)"
            )
            lines.append(f"  on {', '.join(admission['agents'])}")
        return lines
    lines = ["infeasible on this fleet:"]
    lines += [f"  {each['dimension']}: {each['text']}" for each in admission["binding"]]
    if not admission["binding"]:
        lines.append(f"  {admission['text'].removeprefix('infeasible: ')}")
    offers = [each for each in [*admission["nearest"], admission["together"]] if each is not None and each["possible"]]
    if offers:
        lines.append("the nearest contracts that could be kept:")
        lines += [f"  {each['dimension']}: {each['text']}" for each in offers]
    hopeless = [each["dimension"] for each in admission["nearest"] if not each["possible"]]
    if hopeless:
        lines.append(f"giving way in only one of these would not do: {', '.join(hopeless)}")
    return lines


def sla_status(arguments: argparse.Namespace) -> int:
    api = api_of(arguments)
    if arguments.id:
        return _one(arguments, api.get(f"/v1/slas/{arguments.id}/status"))
    slas = api.get("/v1/slas")
    columns = (
        "sla",
        "state",
        "p99 / promised",
        "answered / promised",
        "requests",
        "budget left",
        "alerts",
        "plan",
        "why",
    )
    rows = [
        (
            s["service_id"], s["state"], f"{number_text(s['p99_ms'])} / {s['contract']['latency_p99_ms']:g} ms",
            f"{percent_text(s['availability'], 3)} / {s['contract']['availability_sla']:.3%}", str(s["requests"]),
            percent_text(s["budget_left"]), str(len(s["firing"]) or "-"), str(s["running_epoch"] or "-"), s["text"],
        )
        for s in slas
    ]  # fmt: skip
    return show(arguments, slas, columns, rows)


def _one(arguments: argparse.Namespace, sla: dict[str, Any]) -> int:
    """One contract in full."""
    if arguments.json:
        print(json.dumps([sla], indent=2))  # A list, as without an id.
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    console.print(f"{sla['service_id']} version {sla['version']}: {sla['state']}. {sla['text']}")
    console.print(
        f"Window of {sla['contract']['window_days']} days, {sla['coverage']:.1%} of it observed; risk of a broken contract in "
        f"{sla['risk']['horizon_s'] / 60:.0f} minutes: {sla['risk']['contract']:.1%}\n"
    )
    promises = Table(
        "promise",
        "must be good",
        "limit",
        "counted",
        "bad",
        "attained",
        "budget left",
        "risk",
        box=None,
        pad_edge=False,
    )
    for p in sla["promises"]:
        promises.add_row(
            p["name"], f"{p['share']:.6g}", "-" if p["limit"] is None else f"{p['limit']:g}", f"{p['total']} {p['counts']}", str(p["bad"]),
            percent_text(p["attained"], 3), percent_text(p["left"], 1), percent_text(sla["risk"]["promises"].get(p["name"]), 1),
        )  # fmt: skip
    console.print(promises)
    windows = list(next(iter(sla["burns"].values()), {}))
    burns = Table("burn rate over", *windows, box=None, pad_edge=False)
    for name, rates in sla["burns"].items():
        burns.add_row(name, *("-" if rates[w] is None else f"{rates[w]:.2f}" for w in windows))
    console.print()
    console.print(burns)
    told = [a for a in sla["alerts"] if a["state"] == "firing"]
    console.print()
    console.print("\n".join(f"{a['severity'].upper()} {a['rule']}: {a['sentence']}" for a in told) or "No alert fires.")
    return 0


def sla_report(arguments: argparse.Namespace) -> int:
    path = f"/v1/slas/{arguments.id}/report"
    report = api_of(arguments).get(path, month=arguments.month, format=arguments.format)
    text = report if isinstance(report, str) else json.dumps(report, indent=2) + "\n"
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{arguments.output} cannot be written: {error.strerror}.") from None
    print(f"The report of {arguments.id} is in {arguments.output}.")
    return 0


def sla_export(arguments: argparse.Namespace) -> int:
    contract = contract_from(api_of(arguments).get(f"/v1/slas/{arguments.id}")["contract"])
    if not arguments.openslo:
        print(contract.model_dump_json(indent=2, exclude_defaults=True))
        return 0
    print(yaml.safe_dump_all(to_openslo(contract), sort_keys=False, allow_unicode=True), end="")
    print("OpenSLO cannot say:", *(f"- {each}" for each in UNSAID_THERE), sep="\n  ", file=sys.stderr)
    return 0


def sla_import(arguments: argparse.Namespace) -> int:
    data = read_file(arguments.file)
    if len(data) > MAX_YAML_BYTES:
        raise InvalidInputError(f"{arguments.file} has {len(data)} bytes; at most {MAX_YAML_BYTES} are accepted.")
    imported = from_openslo(parse_yaml(data), service=arguments.service, given=dict(map(_assignment, arguments.set)))
    for note in imported.notes:
        print(f"left out or guessed: {note}", file=sys.stderr)
    if imported.notes:
        print("A contract cannot say:", *(f"- {each}" for each in UNSAID_HERE), sep="\n  ", file=sys.stderr)
    document = json.dumps(imported.contract, indent=2, ensure_ascii=False)
    if not arguments.apply:
        print(document)
        return 0
    applied = api_of(arguments).post("/v1/slas", body=document.encode(), timeout_s=60)
    print(f"SLA {applied['service_id']} is version {applied['version']}: {applied['admission']['text']}")
    return 0


def parse_yaml(data: bytes) -> list[Any]:
    """The documents of a YAML stream. Raises ContractError; aliases and deep nesting, which can blow a file up, are refused."""
    try:
        depth = 0
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ContractError("The file uses YAML aliases.", found="an alias", accepted="YAML without aliases")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ContractError(
                    f"The file is nested more than {MAX_YAML_DEPTH} deep.",
                    found="deeper",
                    accepted=f"at most {MAX_YAML_DEPTH}",
                )
        return list(yaml.safe_load_all(data))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ContractError(f"The file is not YAML: {line}.", found="something else", accepted="OpenSLO v1 as YAML") from None  # fmt: skip


def _assignment(text: str) -> tuple[str, Any]:
    """`FIELD=JSON`; a value that is not JSON is taken as a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidInputError(f"--set {text} is not FIELD=JSON.", found=text, accepted="such as throughput_rps=20")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
