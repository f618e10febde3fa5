"""What the client commands of the command line print. Each takes the parsed arguments; all go through the public API."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from controller.client import ApiClient
from sla.contract import parse_contract
from sla.errors import InvalidInputError

MAX_FILE_BYTES = 2 << 30


def agent_list(arguments: argparse.Namespace) -> int:
    agents = api_of(arguments).get("/v1/agents")
    columns = ("agent", "platform", "evidence", "state", "zone", "last report", "busy", "shards", "GFLOP/s", "ingress")
    rows = [
        (a["id"], a["platform"], a["evidence"], a["state"], a["zone"], _age(a["age_ms"]), percent_text(a["cpu_saturation"]),
         mb_text(a["loaded_bytes"]), number_text((a["calibration"] or {}).get("matmul_gflops")), a["ingress_url"] or "-")
        for a in agents
    ]  # fmt: skip
    return show(arguments, agents, columns, rows)


def agent_drain(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/agents/{arguments.id}:drain")
    print(f"{arguments.id} is being drained.")
    return 0


def agent_undrain(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/agents/{arguments.id}:undrain")
    print(f"{arguments.id} may have work again.")
    return 0


def agent_remove(arguments: argparse.Namespace) -> int:
    api_of(arguments).delete(f"/v1/agents/{arguments.id}")
    print(f"{arguments.id} is removed; it must enroll anew to come back.")
    return 0


def token_create(arguments: argparse.Namespace) -> int:
    offer = api_of(arguments).post(
        "/v1/tokens", json={"uses": arguments.uses, "ttl_s": arguments.ttl, "note": arguments.note}
    )
    if arguments.json:
        print(json.dumps(offer, indent=2))
    else:
        print(
            f"Run this on the device (good for {arguments.uses} use{'s' if arguments.uses > 1 else ''}, {arguments.ttl} s):\n\n  {offer['command']}\n"
        )
    return 0


def key_create(arguments: argparse.Namespace) -> int:
    made = api_of(arguments).post("/v1/keys", json={"role": arguments.role, "note": arguments.note})
    print(
        json.dumps(made, indent=2)
        if arguments.json
        else f"{made['key']}\nThis {made['role']} key is shown once; revoke it with: tidegate key revoke {made['id']}"
    )
    return 0


def key_list(arguments: argparse.Namespace) -> int:
    keys = api_of(arguments).get("/v1/keys")
    rows = [(k["id"], k["role"], k["note"], time.strftime("%Y-%m-%d", time.gmtime(k["created_at_s"]))) for k in keys]
    return show(arguments, keys, ("key", "role", "note", "made"), rows)


def key_revoke(arguments: argparse.Namespace) -> int:
    api_of(arguments).delete(f"/v1/keys/{arguments.id}")
    print(f"The key {arguments.id} is revoked.")
    return 0


def sla_validate(arguments: argparse.Namespace) -> int:
    contract = parse_contract(read_file(arguments.file))
    if arguments.json:
        print(contract.model_dump_json(indent=2))
    else:
        print(f"{arguments.file} is a valid SLA for {contract.service_id}.")
    return 0


def sla_apply(arguments: argparse.Namespace) -> int:
    headers = {"If-Match": f'"{arguments.if_version}"'} if arguments.if_version is not None else None
    applied = api_of(arguments).post("/v1/slas", body=read_file(arguments.file), headers=headers, timeout_s=60)
    if arguments.json:
        print(json.dumps(applied, indent=2))
        return 0
    done = "accepted" if applied["created"] else "updated"
    print(f"SLA {applied['service_id']} {done} as version {applied['version']}: {applied['admission']['text']}")
    return 0


def sla_delete(arguments: argparse.Namespace) -> int:
    api_of(arguments).delete(f"/v1/slas/{arguments.id}")
    print(f"The SLA {arguments.id} is withdrawn.")
    return 0


def plan_show(arguments: argparse.Namespace) -> int:
    plans = [p for p in api_of(arguments).get("/v1/plans", service_id=arguments.service) if p["running"]]
    rows = [
        (p["service_id"], str(p["epoch"]), s["stage"], s["model"], s["agent"], f"{s['blocks'][0]}-{s['blocks'][1]} of {s['block_count']}",
         _share(s["patch"]), _share(s["token"]), s["role"])
        for p in plans
        for s in p["shards"]
    ]  # fmt: skip
    return show(
        arguments, plans, ("service", "plan", "stage", "model", "agent", "blocks", "patch", "token", "role"), rows
    )


def plan_rollback(arguments: argparse.Namespace) -> int:
    answer = api_of(arguments).post(f"/v1/plans/{arguments.service}:rollback", timeout_s=180)
    print(
        f"{arguments.service} runs its last good plan again, as plan {answer['epoch']}; it is pinned until: tidegate plan unpin {arguments.service}"
    )
    return 0


def plan_pin(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/plans/{arguments.service}:pin")
    print(f"The plan of {arguments.service} is pinned; only the loss of a device moves it.")
    return 0


def plan_unpin(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/plans/{arguments.service}:unpin")
    print(f"The loop decides about {arguments.service} again.")
    return 0


def explain(arguments: argparse.Namespace) -> int:
    decisions = api_of(arguments).get("/v1/decisions", service_id=arguments.service, limit=arguments.limit)
    if arguments.json:
        print(json.dumps(decisions, indent=2))
        return 0
    for decision in decisions:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(decision['at_s']))}  {decision['sentence']}")
        if decision["rationale"]:
            print(f"    {decision['rationale']}")
    return 0


def close(arguments: argparse.Namespace) -> None:
    """Close the connections that a command made; it may have ended anyhow."""
    if client := getattr(arguments, "client", None):
        client.close()


def api_of(arguments: argparse.Namespace) -> ApiClient:
    arguments.client = getattr(arguments, "client", None) or ApiClient(
        arguments.url, key=arguments.key, ca_file=arguments.ca_file
    )
    client: ApiClient = arguments.client
    return client


def read_file(name: str | Path) -> bytes:
    path = Path(name)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInputError(f"{name} has more than {MAX_FILE_BYTES} bytes.")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{name} cannot be read: {error.strerror}.") from None


def show(arguments: argparse.Namespace, data: Any, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> int:
    if arguments.json:
        print(json.dumps(data, indent=2))
        return 0
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # A pipe has no width: give it room instead of folding lines that a script will read.
    Console(width=None if sys.stdout.isatty() else 240, highlight=False).print(table)
    return 0


def _age(ms: float | None) -> str:
    return "never" if ms is None else f"{ms / 1000:.1f} s ago"


def percent_text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def number_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def mb_text(value: float | None) -> str:
    return "-" if value is None else f"{value / (1 << 20):.1f} MB"


def _share(span: list[int]) -> str:
    return "all" if span == [0, 1000] else f"{span[0] / 10:.0f}-{span[1] / 10:.0f} %"
