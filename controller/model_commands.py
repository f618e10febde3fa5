"""What the commands about models and services do and print; all go through the public API."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

from controller.client import ApiClient
from controller.commands import api_of, mb_text, read_file, show
from controller.models.drawing import draw_model
from controller.models.folders import check_member
from controller.models.graph import external_files
from controller.uploading import upload
from sla.errors import InvalidInputError, NotFoundError, TidegateError

WORK_TIMEOUT_S = 3600.0
"""Examining a model of many gigabytes, or quantising with hundreds of samples, takes its time."""
_PROGRESS_EVERY_S = 0.3
_COLUMNS = ("#", "block", "ms per run", "ms per item", "weights", "cut after it, per item")
_TYPE_COLUMNS = (
    "type of device",
    "ms, one item",
    "ms, each further",
    "memory peak",
    "runs",
    "within",
    "through",
    "timed on",
)


def model_add(arguments: argparse.Namespace) -> int:
    api, graph = api_of(arguments), Path(arguments.file)
    members = {graph.name: graph} | {
        name: graph.parent / check_member(name) for name in external_files(read_file(graph))
    }

    def work() -> Any:
        files = {name: upload(api, path) for name, path in members.items()}
        sample = upload(api, Path(arguments.sample)) if arguments.sample else None
        wanted = {
            "graph": graph.name, "files": files, "sample": sample, "axis": arguments.axis, "accuracy": arguments.accuracy,
        }  # fmt: skip
        return api.post(f"/v1/models/{quote(arguments.name, safe='')}", json=wanted, timeout_s=WORK_TIMEOUT_S)

    model = with_progress(api, arguments.name, work)
    if arguments.json:
        print(json.dumps(model, indent=2))
        return 0
    print(
        f"Model {model['name']} registered: {_counted(len(model['blocks']), 'block')}, {_axis_text(model)}. It is served as the service {model['name']} once an SLA names it."
    )
    return 0


def model_variant(arguments: argparse.Namespace) -> int:
    api = api_of(arguments)

    def work() -> Any:
        wanted = {
            "suffix": arguments.suffix, "how": _how(arguments, api), "samples": upload(api, Path(arguments.samples)),
            "labels": upload(api, Path(arguments.labels)) if arguments.labels else None, "classes": arguments.classes,
        }  # fmt: skip
        name = quote(arguments.name, safe="")
        return api.post(f"/v1/models/{name}/variants", json=wanted, timeout_s=WORK_TIMEOUT_S)

    variant = with_progress(api, arguments.name, work)
    if arguments.json:
        print(json.dumps(variant, indent=2))
        return 0
    for line in _variant_lines(arguments.name, variant):
        print(line)
    return 0


def _how(arguments: argparse.Namespace, api: ApiClient) -> dict[str, Any]:
    """What the options ask for, as the API takes it. Raises InvalidInputError for options that do not go together."""
    if arguments.precision is not None:
        calibration = upload(api, Path(arguments.calibration)) if arguments.calibration else None
        return {
            "kind": "precision", "precision": arguments.precision, "calibration": calibration,
            "preprocessing": arguments.preprocessing,
        }  # fmt: skip
    if arguments.prune_tokens is not None:
        if arguments.keep is None:
            raise InvalidInputError("Say what share of the tokens stays, e.g. --keep 0.7.", accepted="--keep 0.7")
        return {
            "kind": "prune-tokens", "after": arguments.prune_tokens, "keep": arguments.keep, "protect": arguments.protect,
            "restore": arguments.restore,
        }  # fmt: skip
    if arguments.prune_cache:
        keep = {} if arguments.keep is None else {"keep": arguments.keep}
        return {"kind": "prune-cache", "protect": max(1, arguments.protect), **keep}
    return {"kind": "file", "file": upload(api, Path(arguments.file))}


_MEASURED_BY = {
    "labels": "measured with the labels", "classes": "by how often its strongest class is that of {base}",
    "cosine": "by the mean cosine of its outputs to those of {base}", "nothing": "that of {base}: what pruning costs shows over many calls",
}  # fmt: skip


def _variant_lines(base: str, variant: dict[str, Any]) -> Iterator[str]:
    how = _MEASURED_BY[variant["measured_by"]].format(base=base)
    yield f"Variant {variant['name']} registered: accuracy {variant['accuracy']:.4f}, {how}."
    if variant["cache_ratio"] is not None:
        yield f"Its caches have {variant['cache_ratio']:.2f} of the bytes; turn it with: tidegate service tune {variant['name']} model.keep=0.6"
        return
    differs = "" if variant["difference"] is None else f", largest relative difference {variant['difference']:.2g}"
    yield (
        f"It takes {variant['time_ratio']:.2f} of the time and {variant['size_ratio']:.2f} of the size; "
        f"smallest cosine {variant['cosine']:.5f}{differs}."
    )
    if variant["base_right"] is not None:
        yield (
            f"{base} itself gets {variant['base_right']:.4f} of the labels right and is registered with {variant['base_accuracy']:.4f}; "
            f"tidegate model add {base} FILE --accuracy changes that."
        )
    yield f"The solver may choose it where the accuracy floor allows, in: {', '.join(variant['services'])}."


def model_activations(arguments: argparse.Namespace) -> int:
    api = api_of(arguments)
    samples = upload(api, Path(arguments.samples)) if arguments.samples else None
    wanted = {"format": arguments.format, "samples": samples, "classes": arguments.classes}
    path = f"/v1/models/{quote(arguments.name, safe='')}/activations"
    answer = api.put(path, json=wanted, timeout_s=WORK_TIMEOUT_S)
    rows = [
        (
            one["service"], one["stage"], one["model"], one["format"], f"{one['bytes_ratio']:.2f}", f"{one['kept_accuracy']:.5f}",
            f"{one['cosine']:.5f}", f"{one['difference']:.2g}",
        )
        for one in answer
    ]  # fmt: skip
    columns = ("service", "stage", "model", "format", "bytes", "accuracy kept", "cosine", "difference")
    return show(arguments, answer, columns, rows)


def model_delete(arguments: argparse.Namespace) -> int:
    gone = api_of(arguments).delete(f"/v1/models/{quote(arguments.name, safe='')}")
    also = "".join([
        f"; so is the service {', '.join(gone['services'])}" if gone["services"] else "",
        f"; these stages may not run it any more: {', '.join(gone['stages'])}" if gone["stages"] else "",
    ])  # fmt: skip
    print(f"The model {arguments.name} is removed{also}.")
    return 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _axis_text(model: dict[str, Any]) -> str:
    if model["split_axis"]:
        return f"its items are independent along the {model['split_axis']} axis"
    until = model.get("split_until") or 0
    if until:
        return f"its items are independent up to block {until} ({model['blocks'][until]['name']})"
    return "no axis was proven to act item by item"


def with_progress(api: ApiClient, name: str, work: Callable[[], Any]) -> Any:
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
            mb_text(sum(b["param_bytes"] for b in m["blocks"])),
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
    if arguments.device is not None:
        model = on_device(model, arguments.device)
    if arguments.svg is not None:
        where = "one core" if arguments.device is None else model["devices"][0]["device_type"]
        Path(arguments.svg).write_text(draw_model(model, where), encoding="utf-8")
        print(f"The blocks of {arguments.name} are drawn in {arguments.svg}.")
        return 0
    rows = [
        (str(number), b["name"], f"{b['fixed_ms']:.2f}", f"{b['per_item_ms']:.2f}", mb_text(b["param_bytes"]),
         f"{b['cut_bytes_per_item'] / 1024:.0f} KB")
        for number, b in enumerate(model["blocks"])
    ]  # fmt: skip
    show(arguments, model, _COLUMNS, rows)
    if not arguments.json and model["devices"]:
        print()
        show(arguments, model, _TYPE_COLUMNS, [_type_row(device) for device in model["devices"]])
    return 0


def on_device(model: dict[str, Any], wanted: str) -> dict[str, Any]:
    """The model with the times of one type of device, which may be named by how its name begins. Raises NotFoundError, InvalidInputError."""
    fitting = [device for device in model["devices"] if device["device_type"] == wanted]
    fitting = fitting or [device for device in model["devices"] if device["device_type"].startswith(wanted)]
    names = ", ".join(device["device_type"] for device in fitting or model["devices"])
    if not fitting:
        raise NotFoundError(f"{model['name']} was not timed on {wanted!r}; it was on: {names or 'none yet'}.")
    if len(fitting) > 1:
        raise InvalidInputError(f"{wanted!r} begins several types of devices: {names}.", found=wanted, accepted=names)
    (device,) = fitting
    blocks = [block | times for block, times in zip(model["blocks"], device["blocks"], strict=True)]
    return model | {"blocks": blocks, "devices": [device]}


def _type_row(device: dict[str, Any]) -> tuple[str, ...]:
    fixed, each = (sum(block[name] for block in device["blocks"]) for name in ("fixed_ms", "per_item_ms"))
    peak = mb_text(device["peak_bytes"]) if device["peak_bytes"] else "-"
    return (
        device["device_type"], f"{fixed + each:.1f}", f"{each:.1f}", peak, str(device["runs"]), f"{device['spread']:.0%}",
        device["provider"], device["agent"],
    )  # fmt: skip


def service_add(arguments: argparse.Namespace) -> int:
    service = api_of(arguments).post("/v1/services", json={"builtin": arguments.name}, timeout_s=900)
    print(f"Service {service['id']} registered: {' -> '.join(stage['name'] for stage in service['stages'])}")
    return 0
