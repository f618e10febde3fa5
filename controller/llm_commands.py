"""What the commands about the LLM and about intents print."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from controller.commands import api_of, number_text, percent_text, show
from sla.errors import InvalidInputError


def llm_report(arguments: argparse.Namespace) -> int:
    report = api_of(arguments).get("/v1/llm/report", service_id=arguments.service)
    if not arguments.json:
        print("\n".join(report_lines(report)))
    rows = [
        (
            _clock(each["at_s"]), each["service_id"], str(each["epoch"]), _came_to(each), each["solver"]["what"],
            number_text(each["solver"]["predicted_p99_ms"]), each["llm"]["what"] if each["llm"] else "-",
            number_text(each["llm"]["predicted_p99_ms"]) if each["llm"] else "-", _effect(each["solver"]), _effect(each["llm"]),
            f"{each['regret']:.3f}", f"{each['seconds']:.1f}",
        )
        for each in report["comparisons"]
    ]  # fmt: skip
    columns = (
        "at", "service", "plan", "came to", "solver", "p99 ms", "llm", "p99 ms", "solver's effect ms", "llm's effect ms", "regret",
        "seconds",
    )  # fmt: skip
    return show(arguments, report, columns, rows)


def report_lines(report: dict[str, Any]) -> list[str]:
    """The counts, for people."""
    refused = ", ".join(f"{reason} {count}" for reason, count in report["refused"].items()) or "none"
    fallback = ", ".join(f"{reason} {count}" for reason, count in report["fallback"].items()) or "none"
    regret = (
        "-" if report["worst_regret"] is None else f"{report['mean_regret']:.4f}, at worst {report['worst_regret']:.4f}"
    )
    return [
        f"Who decides: {report['policy']} (mode {report['mode']})",
        f"asked {report['asked']}: own choice admitted {report['won']} ({percent_text(report['win_rate'])}), same as the solver "
        f"{report['agreed']}, acted {report['acted']}",
        f"refused by the gate: {refused}; solver's plan instead: {fallback}",
        f"regret after the gate {regret}; tokens {report['prompt_tokens']} in ({report['cached_tokens']} of them cached), {report['output_tokens']} out, cost {report['cost']:.4g}; "
        f"{report['tokens_this_hour']} of {report['tokens_per_hour']} tokens this hour",
        _effects_line(report),
        "",
    ]


def _effects_line(report: dict[str, Any]) -> str:
    gap = report["mean_effect_behind_ms"]
    if gap is None:
        return "by effect: nothing was measured yet since a choice"
    way = "slower" if gap > 0 else "quicker"
    return f"by effect, over {report['settled']} choices: the LLM's p99 is {abs(gap):.0f} ms {way} than the solver's (see below what was estimated)"


def _effect(side: dict[str, Any] | None) -> str:
    """What a choice turned out to bring."""
    if side is None or side["effect_p99_ms"] is None:
        return "-"
    return f"{side['effect_p99_ms']:.0f} {side['effect_how']}"


def llm_advice(arguments: argparse.Namespace) -> int:
    found = api_of(arguments).get("/v1/llm/advice")
    rows = [
        (a["id"], a["service_id"], a["text"], number_text(a["predicted_p99_ms"]), number_text(a["solver_p99_ms"]), a["rationale"])
        for a in found
    ]  # fmt: skip
    return show(arguments, found, ("advice", "service", "what", "p99 ms", "solver's p99 ms", "why"), rows)


def llm_accept(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/llm/advice/{arguments.id}:accept")
    print("The advice is followed if the gate still admits it; see: tidegate explain")
    return 0


def llm_dismiss(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/llm/advice/{arguments.id}:dismiss")
    print("The advice is dismissed.")
    return 0


def intent_add(arguments: argparse.Namespace) -> int:
    api = api_of(arguments)
    body: dict[str, Any] = {"service_id": arguments.service}
    if rules := rules_of(arguments):
        body |= {"rules": rules, "starts_in_s": 60.0 * arguments.starts_in, "lasts_s": 60.0 * arguments.minutes}
    else:
        body["text"] = arguments.text
    intent = api.post("/v1/intents", json=body, timeout_s=60)
    if not arguments.json:
        print(f"Understood, for {intent['service_id']} (intent {intent['id']}):")
        print("\n".join(f"  {rule['text']}" for rule in intent["rules"]))
    if arguments.yes or (sys.stdin.isatty() and not arguments.json and _asked("Put it in force? [y/N] ")):
        intent = api.post(f"/v1/intents/{intent['id']}:confirm")
    if arguments.json:
        print(json.dumps(intent, indent=2))
    elif intent["state"] == "proposed":
        print(f"Nothing acts yet. Confirm it with: tidegate intent confirm {intent['id']}")
    else:
        print(f"It is {intent['state']}. Take it back with: tidegate intent revoke {intent['id']}")
    return 0


def intent_list(arguments: argparse.Namespace) -> int:
    found = api_of(arguments).get("/v1/intents", service_id=arguments.service)
    rows = [
        (
            i["id"],
            i["service_id"],
            i["state"],
            i["by"],
            i["confirmed_by"] or "-",
            "; ".join(r["text"] for r in i["rules"]),
            i["said"],
        )
        for i in found
    ]
    return show(arguments, found, ("intent", "service", "state", "by", "confirmed by", "what", "said"), rows)


def intent_confirm(arguments: argparse.Namespace) -> int:
    intent = api_of(arguments).post(f"/v1/intents/{arguments.id}:confirm")
    print(f"Intent {intent['id']} is {intent['state']}: {'; '.join(rule['text'] for rule in intent['rules'])}.")
    return 0


def intent_revoke(arguments: argparse.Namespace) -> int:
    api_of(arguments).post(f"/v1/intents/{arguments.id}:revoke")
    print(f"Intent {arguments.id} is revoked.")
    return 0


def rules_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The rules that the options say. Raises InvalidInputError."""
    rules: list[dict[str, Any]] = []
    for kind in ("avoid", "prefer"):
        for place in getattr(arguments, kind):
            zone = place.removeprefix("zone:")
            rules.append({"kind": kind, **({"zone": zone} if zone != place else {"agent": place})})
    for bound in arguments.only:
        stage, found, models = bound.partition("=")
        if not found:
            raise InvalidInputError(f"--only wants STAGE=MODEL, not {bound!r}.")
        rules.append({"kind": "bound", "stage": stage, "models": models.split(",")})
    rules += [_knob_rule(said) for said in arguments.knob]
    if arguments.weigh:
        rules.append({"kind": "shift", **dict(_factor(said) for said in arguments.weigh)})
    if arguments.keep:
        rules.append({"kind": "keep"})
    if rules and arguments.text:
        raise InvalidInputError("Give either a sentence or options, not both.")
    if not rules and not arguments.text.strip():
        raise InvalidInputError("Say what you want: a sentence, or --avoid, --prefer, --only, --knob, --weigh, --keep.")
    return rules


def _knob_rule(said: str) -> dict[str, Any]:
    knob, found, ends = said.partition("=")
    low, between, high = ends.partition("..")
    if not (found and between):
        raise InvalidInputError(f"--knob wants STAGE.KNOB=LOW..HIGH, not {said!r}.")
    return {"kind": "bound", "knob": knob, "low": _float(low, "--knob"), "high": _float(high, "--knob")}


def _factor(said: str) -> tuple[str, float]:
    part, found, factor = said.partition("=")
    if not found or part not in ("risk", "jitter", "saturation"):
        raise InvalidInputError(f"--weigh wants risk, jitter or saturation=FACTOR, not {said!r}.")
    return part, _float(factor, "--weigh")


def _float(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInputError(f"{option} wants numbers, and {text!r} is none.") from None


def _asked(question: str) -> bool:
    return input(question).strip().lower() in ("y", "yes")


def _came_to(each: dict[str, Any]) -> str:
    return (
        f"{each['verdict']}{' (' + each['reason'] + ')' if each['reason'] else ''}{', acted' if each['acted'] else ''}"
    )


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
