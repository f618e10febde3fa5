"""`tidegate replay`: makes the decisions of a log again, bit for bit, and lays another policy beside them.

What the LLM was asked is decided again too, from its recorded replies and without the endpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from controller.commands import api_of
from controller.llm_replay import ReplayedExchange
from controller.llm_replay import replayed as replayed_exchange
from controller.replay import MAX_LOG_BYTES, Replayed, log_from, replay, same_of
from policies.decision import Decision
from sla.errors import InvalidInputError


def run_replay(arguments: argparse.Namespace) -> int:
    """Status 0 when every decision came out the same, 1 when one did not."""
    data = _log_data(arguments)
    if arguments.save is not None:
        Path(arguments.save).write_bytes(data)
    log = log_from(data)
    replayed = replay(log, arguments.policy)
    asked = [replayed_exchange(each.exchange, each.seen) for each in log.exchanges]
    if arguments.html is not None:
        Path(arguments.html).write_text(report(replayed, arguments.policy, asked), encoding="utf-8")
    if arguments.json:
        print(json.dumps([*(_as_json(r) for r in replayed), *(_asked_json(each) for each in asked)], indent=2))
    else:
        for entry in replayed:
            _print(entry, arguments.policy)
        for each in asked:
            print(f"{_when(each.exchange.at_s)}  [{_verdict(each)}]  {_asked_words(each)}")
        print(_sum(replayed, asked))
    return 1 if same_of(replayed)[1] or any(_verdict(each) == "DIFFERENT" for each in asked) else 0


def _sum(replayed: Sequence[Replayed], asked: Sequence[ReplayedExchange]) -> str:
    same, different, untried = same_of(replayed)
    said = f"{same} decided the same again, {different} differently, {untried} cannot be replayed."
    if not asked:
        return said
    verdicts = [_verdict(each) for each in asked]
    return (
        f"{said} The LLM's answers: {verdicts.count('the same')} the same, {verdicts.count('DIFFERENT')} different, "
        f"{verdicts.count('cannot be replayed')} cannot be replayed."
    )


def _verdict(each: ReplayedExchange) -> str:
    return "cannot be replayed" if each.is_gone else "the same" if each.same_decision else "DIFFERENT"


def _asked_words(each: ReplayedExchange) -> str:
    chosen = each.exchange.llm.what if each.exchange.llm is not None else "no choice"
    prompt = "" if each.same_prompt or each.is_gone else " (this version would ask in other words)"
    return f"{each.exchange.service_id}: llm {each.exchange.model}, {chosen}: {each.text}{prompt}"


def _asked_json(each: ReplayedExchange) -> dict[str, Any]:
    return {
        "id": each.exchange.id, "at_s": each.exchange.at_s, "sentence": _asked_words(each), "llm": each.exchange.verdict,
        "replayed": not each.is_gone, "same": each.same_decision, "same_prompt": each.same_prompt,
    }  # fmt: skip


def report(replayed: Sequence[Replayed], policy: str | None, asked: Sequence[ReplayedExchange] = ()) -> str:
    """A page that lays what was decided and what another policy would have done side by side."""
    heads = ["when", "decided", "again", "p99", "risk"] + ([escape(policy), "p99", "risk"] if policy else [])
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(r, policy))}</tr>" for r in replayed)
    questions = "".join(
        f"<tr><td>{_when(each.exchange.at_s)}</td><td>{escape(_asked_words(each))}</td><td>{_verdict(each)}</td></tr>"
        for each in asked
    )
    table = (
        f"<h2>What the LLM was asked</h2><table><tr><th>when</th><th>asked</th><th>again</th></tr>{questions}</table>"
    )
    return (
        "<!doctype html><meta charset=utf-8><title>Replay</title><style>body{font:14px sans-serif;margin:2em}"
        "td,th{border-bottom:1px solid #ddd;padding:4px 8px;text-align:left;vertical-align:top}</style>"
        f"<h1>Replay</h1><p>{escape(_sum(replayed, asked))}</p>"
        f"<table><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>{rows}</table>{table if asked else ''}\n"
    )


def _cells(entry: Replayed, policy: str | None) -> list[str]:
    decision = entry.record.decision
    again = "-" if entry.again is None else "same" if entry.is_same else f"<b>{escape(entry.again.sentence())}</b>"
    cells = [_when(entry.record.at_s), escape(decision.sentence()), again, *_figures(decision)]
    if policy is not None:
        cells += ["-", "", ""] if entry.other is None else [escape(_wanted(entry.other)), *_figures(entry.other)]
    return cells


def _wanted(decision: Decision) -> str:
    if decision.plan is None:
        return "; ".join(r.text for r in decision.reasons) or "keeps the running plan"
    places = [
        f"{s.stage}: {', '.join(sorted({x.agent for lane in s.lanes for x in lane.shards}))}"
        for s in decision.plan.stages
    ]
    return "; ".join(places) + "".join(f" (refused: {r.text})" for r in decision.reasons)


def _figures(decision: Decision) -> list[str]:
    p = decision.prediction
    return ["", ""] if p is None else [f"{p.p99_ms:.0f} ms", f"{100 * p.risk:.1f} %"]


def _print(entry: Replayed, policy: str | None) -> None:
    verdict = "cannot be replayed" if entry.again is None else "the same" if entry.is_same else "DIFFERENT"
    print(f"{_when(entry.record.at_s)}  [{verdict}]  {entry.record.decision.sentence()}")
    if entry.again is not None and not entry.is_same:
        print(f"    now: {entry.again.sentence()}")
    if policy is not None and entry.other is not None:
        print(f"    {policy}: {_wanted(entry.other)} {' '.join(_figures(entry.other))}")


def _as_json(entry: Replayed) -> dict[str, Any]:
    other = entry.other
    return {
        "id": entry.record.id, "at_s": entry.record.at_s, "sentence": entry.record.decision.sentence(),
        "replayed": entry.again is not None, "same": entry.is_same,
        "other": None if other is None else {
            "wants": _wanted(other), "p99_ms": other.prediction.p99_ms if other.prediction else None,
            "risk": other.prediction.risk if other.prediction else None, "score": other.score,
        },
    }  # fmt: skip


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _log_data(arguments: argparse.Namespace) -> bytes:
    if arguments.log is None:
        if arguments.service is None:
            raise InvalidInputError("Name a log file, or a service of a running controller with --service.")
        return api_of(arguments).get_bytes(f"/v1/decisions/{arguments.service}:log", limit=arguments.limit)
    try:
        path = Path(arguments.log)
        if path.stat().st_size > MAX_LOG_BYTES:
            raise InvalidInputError(f"{arguments.log} is larger than a decision log may be.")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"The log {arguments.log} cannot be read: {error.strerror}.") from None
