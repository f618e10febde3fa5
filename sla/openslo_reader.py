"""A contract out of OpenSLO v1 objects, whoever wrote them. What a contract cannot say is noted and left out (`sla.openslo`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sla.burn import RULES, duration
from sla.contract import SHARE_OF, Contract, Objective, contract_from
from sla.errors import ContractError
from sla.openslo import ANNOTATED, ANNOTATION, API_VERSION, Document
from sla.refusals import kind_of, rendered, shorten

MAX_OBJECTS = 500


class Imported(msgspec.Struct, frozen=True):
    """A contract's document and what was left out of it."""

    contract: Document
    notes: tuple[str, ...]


def from_openslo(documents: Iterable[Any], *, service: str | None = None, given: Mapping[str, Any] | None = None) -> Imported:  # fmt: skip
    """The contract in OpenSLO v1 objects; `service` chooses one of several, `given` are fields that win over what was found.

    Raises ContractError when the objects make no sense, when something that a contract needs is missing, or when what they say
    contradicts itself. What a contract cannot say is left out and noted.
    """
    return _Reader(documents, service).read(dict(given or {}))


class _Reader:
    """Reads one service out of a heap of objects."""

    def __init__(self, documents: Iterable[Any], service: str | None) -> None:
        self.objects = [_checked(at, document) for at, document in enumerate(_bounded(documents))]
        self.service = service or self._only_service()
        self.notes: list[str] = []
        self.found: Document = {"service_id": self.service}
        self.times: dict[tuple[str, str], float] = {}

    def read(self, given: Document) -> Imported:
        self._read_service()
        slos = [document for document in self._all("SLO") if _text(document["spec"], "service") == self.service]
        if not slos:
            raise ContractError(
                f"There is no SLO for the service {shorten(self.service)!r}.", found="none", accepted="one SLO or more"
            )
        for slo in slos:
            self._read_slo(slo)
        self._note_others()
        self._place_times()
        merged = {**self.found, **given}
        contract = contract_from(merged)
        return Imported(
            contract.model_dump(mode="json", exclude_defaults=True) | _required(contract), tuple(dict.fromkeys(self.notes))
        )  # fmt: skip

    def _only_service(self) -> str:
        named = {document["metadata"]["name"] for document in self._all("Service")}
        named |= {_text(document["spec"], "service") for document in self._all("SLO")}
        if len(named) != 1:
            raise ContractError(
                f"The file speaks of {len(named)} services; a contract is for one.", found=shorten(", ".join(sorted(named))) or "none",
                accepted="one service, or the name of one of them",
            )  # fmt: skip
        return str(next(iter(named)))

    def _all(self, kind: str) -> list[Document]:
        return [document for document in self.objects if document["kind"] == kind]

    def _read_service(self) -> None:
        for document in self._all("Service"):
            if document["metadata"]["name"] != self.service:
                continue
            annotations = document["metadata"].get("annotations")
            for key, value in (annotations if isinstance(annotations, dict) else {}).items():
                field = str(key).removeprefix(ANNOTATION)
                if str(key).startswith(ANNOTATION) and field in ANNOTATED:
                    self.found[field] = _json(str(key), value)

    def _read_slo(self, slo: Document) -> None:
        name, spec = slo["metadata"]["name"], slo["spec"]
        self._read_window(name, spec.get("timeWindow"))
        indicator = self._indicator(name, spec)
        objectives = spec.get("objectives")
        if not isinstance(objectives, list) or not objectives:
            raise ContractError(f"The SLO {shorten(name)!r} has no objectives.", found=kind_of(objectives), accepted="a list of objectives")  # fmt: skip
        for objective in objectives:
            if not isinstance(objective, dict):
                raise ContractError(f"An objective of {shorten(name)!r} is not an object.", found=kind_of(objective), accepted="an object")  # fmt: skip
            self._read_objective(name, indicator, objective)

    def _indicator(self, name: str, spec: Document) -> Document:
        inline, ref = spec.get("indicator"), spec.get("indicatorRef")
        if isinstance(inline, dict) and isinstance(inline.get("spec"), dict):
            return dict(inline["spec"])
        for document in self._all("SLI"):
            if document["metadata"]["name"] == ref:
                return dict(document["spec"])
        raise ContractError(
            f"The SLO {shorten(name)!r} has no indicator.", found=rendered(ref), accepted="an indicator, or the name of an SLI in the same file"
        )  # fmt: skip

    def _read_window(self, name: str, windows: Any) -> None:
        entry = windows[0] if isinstance(windows, list) and len(windows) == 1 and isinstance(windows[0], dict) else None
        if entry is None:
            if windows:
                self.notes.append(f"{name}: the time window is not understood; the default is taken")
            return
        days = _days(entry.get("duration"))
        if days is None or entry.get("isRolling") is False or "calendar" in entry:
            self.notes.append(f"{name}: only rolling windows of 1 to 90 whole days can be said; the default is taken")
            return
        if self.found.setdefault("window_days", days) != days:
            raise ContractError(
                f"The SLOs of {shorten(self.service)} have different time windows; a contract has one.", pointer="/window_days",
                found=f"{self.found['window_days']} and {days} days", accepted="one time window",
            )  # fmt: skip

    def _read_objective(self, name: str, indicator: Document, objective: Document) -> None:
        target = _target_of(name, objective)
        if "ratioMetric" in indicator:
            if target > self.found.get("availability_sla", 0.0):
                if "availability_sla" in self.found:
                    self.notes.append(f"{name}: several availability targets; the strictest is taken")
                self.found["availability_sla"] = target
            return
        op, value = objective.get("op"), objective.get("value")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ContractError(
                f"An objective of {shorten(name)!r} has no value.", found=rendered(value), accepted="a number"
            )
        if op in ("gte", "gt"):
            self.found["throughput_rps"] = value
            return
        percentile = next((p for p, share in SHARE_OF.items() if abs(share - target) < 1e-9), None)
        if op not in ("lte", "lt") or percentile is None:
            self.notes.append(f"{name}: the objective {op} {value} for {target:.6g} of the time cannot be said")
            return
        if not _is_ours(indicator):
            self.notes.append(f"{name}: the value {rendered(value)} is read as milliseconds of latency")
        key = (_metric(indicator), percentile)
        self.times[key] = min(value, self.times.get(key, value))

    def _place_times(self) -> None:
        p99 = self.times.pop(("latency", "p99"), None)
        if p99 is not None:
            self.found["latency_p99_ms"] = p99
        if self.times:
            self.found["objectives"] = [
                Objective(metric=metric, percentile=percentile, at_most_ms=1.0).model_dump(exclude_defaults=True)  # type: ignore[arg-type]
                | {"at_most_ms": value}
                for (metric, percentile), value in self.times.items()
            ]

    def _note_others(self) -> None:
        ours = [duration(rule.long_s) for rule in RULES]
        for document in self.objects:
            kind, name = document["kind"], document["metadata"]["name"]
            if kind == "AlertPolicy" and not all(window in ours for window in _lookbacks(document["spec"])):
                self.notes.append(f"{name}: Tidegate alerts by its own four burn rules")
            elif kind in ("DataSource", "AlertCondition") or (
                kind == "AlertNotificationTarget" and document["spec"].get("target") != "tidegate"
            ):
                self.notes.append(f"{name}: a {kind} cannot be said")


def _bounded(documents: Iterable[Any]) -> list[Any]:
    found = []
    for document in documents:
        if document is None:
            continue  # An empty YAML document.
        found.append(document)
        if len(found) > MAX_OBJECTS:
            raise ContractError(f"The file has more than {MAX_OBJECTS} objects.", found=f"over {MAX_OBJECTS}", accepted=f"at most {MAX_OBJECTS}")  # fmt: skip
    return found


def _checked(at: int, document: Any) -> Document:
    """An object with the parts that all kinds have."""
    if not isinstance(document, dict):
        raise ContractError(f"Object {at + 1} is {kind_of(document)}.", found=kind_of(document), accepted="an OpenSLO object")  # fmt: skip
    if document.get("apiVersion") != API_VERSION:
        raise ContractError(
            f"Object {at + 1} is of {rendered(document.get('apiVersion'))}; accepted is {API_VERSION}.", pointer="/apiVersion",
            found=rendered(document.get("apiVersion")), accepted=API_VERSION,
        )  # fmt: skip
    metadata, spec = document.get("metadata"), document.get("spec")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str) or not isinstance(document.get("kind"), str):  # fmt: skip
        raise ContractError(
            f"Object {at + 1} has no kind or no name.",
            pointer="/metadata/name",
            found="nothing",
            accepted="kind and metadata.name",
        )
    return {"kind": document["kind"], "metadata": metadata, "spec": spec if isinstance(spec, dict) else {}}


def _text(spec: Document, field: str) -> str:
    value = spec.get(field)
    return value if isinstance(value, str) else ""


def _json(key: str, value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):
        raise ContractError(
            f"The annotation {shorten(key)} is not JSON.", pointer=f"/{shorten(key).removeprefix(ANNOTATION)}", found=rendered(value),
            accepted="a JSON value",
        ) from None  # fmt: skip


def _target_of(name: str, objective: Document) -> float:
    target, percent = objective.get("target"), objective.get("targetPercent")
    value = target if target is not None else percent
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or abs(value) > 1e9
        or (target is None) == (percent is None)
    ):
        raise ContractError(
            f"An objective of {shorten(name)!r} has no target.", found=rendered(value), accepted="target or targetPercent, a number"
        )  # fmt: skip
    share = float(value) if target is not None else round(float(value) / 100.0, 12)
    if not 0.0 < share < 1.0:
        raise ContractError(
            f"The target of {shorten(name)!r} is {rendered(value)}.",
            found=rendered(value),
            accepted="a share between 0 and 1, or a percentage below 100",
        )
    return share


def _days(text: Any) -> int | None:
    match = re.fullmatch(r"(\d{1,4})([dwhm])", text) if isinstance(text, str) else None
    if match is None:
        return None
    minutes = int(match.group(1)) * {"m": 1, "h": 60, "d": 1440, "w": 10_080}[match.group(2)]
    return minutes // 1440 if minutes % 1440 == 0 and 1 <= minutes // 1440 <= 90 else None


def _spec_of(indicator: Document) -> Document:
    metric = indicator.get("thresholdMetric")
    source = metric.get("metricSource") if isinstance(metric, dict) else None
    return source if isinstance(source, dict) else {}


def _is_ours(indicator: Document) -> bool:
    return _spec_of(indicator).get("type") == "tidegate"


def _metric(indicator: Document) -> str:
    spec = _spec_of(indicator).get("spec")
    measures = str(spec.get("measures", "")) if _is_ours(indicator) and isinstance(spec, dict) else ""
    metric = measures.partition(" ")[0]
    return metric if metric in ("time-to-first-token", "inter-token") else "latency"


def _lookbacks(spec: Document) -> list[Any]:
    """The windows of a policy's inline conditions; something that is no window for all others."""
    found: list[Any] = []
    conditions = spec.get("conditions")
    for entry in conditions if isinstance(conditions, list) else []:
        inner = entry.get("spec") if isinstance(entry, dict) else None
        condition = inner.get("condition") if isinstance(inner, dict) else None
        found.append(condition.get("lookbackWindow") if isinstance(condition, dict) else None)
    return found


def _required(contract: Contract) -> Document:
    return {
        "service_id": contract.service_id, "latency_p99_ms": contract.latency_p99_ms,
        "throughput_rps": contract.throughput_rps, "availability_sla": contract.availability_sla,
    }  # fmt: skip
