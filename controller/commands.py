"""What the client commands of the command line print. Each takes the parsed arguments; all go through the public API."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from controller.client import ApiClient
from controller.models.drawing import draw_model
from sla.contract import parse_contract
from sla.errors import InvalidInputError, NotFoundError, TidegateError

MAX_FILE_BYTES = 2 << 30
_PROGRESS_EVERY_S = 0.3


def agent_list(arguments: argparse.Namespace) -> int:
    agents = api_of(arguments).get("/v1/agents")
    columns = ("agent", "platform", "evidence", "state", "zone", "last report", "busy", "shards", "GFLOP/s", "ingress")
    rows = [
        (a["id"], a["platform"], a["evidence"], a["state"], a["zone"], _age(a["age_ms"]), percent_text(a["cpu_saturation"]),
         _mb(a["loaded_bytes"]), number_text((a["calibration"] or {}).get("matmul_gflops")), a["ingress_url"] or "-")
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


def model_add(arguments: argparse.Namespace) -> int:
    data, api = read_file(arguments.file), api_of(arguments)
    model = _with_progress(
        api, arguments.name, lambda: api.put(f"/v1/models/{arguments.name}", body=data, timeout_s=900)
    )
    axis = _axis_text(model)
    print(
        f"Model {model['name']} registered: {len(model['blocks'])} blocks, {axis}. It is served as the service {model['name']} once an SLA names it."
    )
    return 0


def _axis_text(model: dict[str, Any]) -> str:
    if model["split_axis"]:
        return f"its items are independent along the {model['split_axis']} axis"
    until = model.get("split_until") or 0
    if until:
        return f"its items are independent up to block {until} ({model['blocks'][until]['name']})"
    return "no axis was proven to act item by item"


def _with_progress(api: ApiClient, name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; meanwhile what the controller says about the model is shown on stderr."""
    seen = {(e["at_s"], e["text"]) for e in _model_events(api, name)}
    with ThreadPoolExecutor(1) as pool:
        doing = pool.submit(work)
        while True:
            finished = wait([doing], timeout=_PROGRESS_EVERY_S).done
            for event in _model_events(api, name):
                if (event["at_s"], event["text"]) not in seen:
                    seen.add((event["at_s"], event["text"]))
                    print(f"  {event['text']}", file=sys.stderr)
            if finished:
                return doing.result()


def _model_events(api: ApiClient, name: str) -> list[dict[str, Any]]:
    """Progress is worth no error: if the controller cannot be asked, the work itself will say why."""
    try:
        return [e for e in api.get("/v1/events") if e["kind"] == "model" and e["service"] == name]
    except TidegateError:
        return []


def model_list(arguments: argparse.Namespace) -> int:
    models = api_of(arguments).get("/v1/models")
    rows = [
        (
            m["name"],
            str(len(m["blocks"])),
            m["split_axis"] or "-",
            _mb(sum(b["param_bytes"] for b in m["blocks"])),
            f"{m['accuracy']:.2f}",
            m["sha256"][:12],
        )
        for m in models
    ]
    return show(arguments, models, ("model", "blocks", "split axis", "weights", "accuracy", "sha256"), rows)


def model_show(arguments: argparse.Namespace) -> int:
    model = next((m for m in api_of(arguments).get("/v1/models") if m["name"] == arguments.name), None)
    if model is None:
        raise NotFoundError(f"There is no model {arguments.name!r}; list them with: tidegate model list")
    if arguments.svg is not None:
        Path(arguments.svg).write_text(draw_model(model), encoding="utf-8")
        print(f"The blocks of {arguments.name} are drawn in {arguments.svg}.")
        return 0
    rows = [
        (
            str(number),
            b["name"],
            f"{b['fixed_ms']:.2f}",
            f"{b['per_item_ms']:.2f}",
            _mb(b["param_bytes"]),
            f"{b['cut_bytes_per_item'] / 1024:.0f} KB",
        )
        for number, b in enumerate(model["blocks"])
    ]
    return show(
        arguments, model, ("#", "block", "ms per run", "ms per item", "weights", "cut after it, per item"), rows
    )


def service_add(arguments: argparse.Namespace) -> int:
    service = api_of(arguments).post("/v1/services", json={"builtin": arguments.name}, timeout_s=900)
    print(f"Service {service['id']} registered: {' -> '.join(stage['name'] for stage in service['stages'])}")
    return 0


def service_list(arguments: argparse.Namespace) -> int:
    services = api_of(arguments).get("/v1/services")
    rows = [(s["id"], " -> ".join(stage["name"] for stage in s["stages"])) for s in services]
    return show(arguments, services, ("service", "stages"), rows)


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


def read_file(name: str) -> bytes:
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


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / (1 << 20):.1f} MB"


def _share(span: list[int]) -> str:
    return "all" if span == [0, 1000] else f"{span[0] / 10:.0f}-{span[1] / 10:.0f} %"
