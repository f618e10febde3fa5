"""The LLM beside the solver: 200 generated decisions of five kinds, whatever model there is, and what must hold with any.

`--base-url` and `--model` (or `TIDEGATE_LLM_BASE_URL` and `TIDEGATE_LLM_MODEL`; the key in `TIDEGATE_LLM_API_KEY`) name a real
endpoint. Without them a stand-in answers at random, as a model of 135 million parameters was seen to do: the rows about
choices then say nothing about any model, the goals still must hold.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from benchmarks.common import Row, at_most
from benchmarks.llm_scenarios import KINDS, Scenario, is_right, scenarios
from benchmarks.llm_server import Answer, LlmServer, says
from controller.clock import SystemClock
from controller.events import EventLog
from controller.llm import LlmAdvisor
from controller.llm_endpoint import Completion, LlmEndpoint, LlmUnusableError
from controller.settings import LlmSettings
from policies.admit import SCORE_TOLERANCE, admit
from policies.decide import Keep, Memory, decide
from policies.decision import Proposal
from policies.llm import Malformed, Question, ask, parse
from policies.llm_judge import Judged, judge

SCENARIOS, QUICK_SCENARIOS = 200, 25
HOSTILE, QUICK_HOSTILE = 10_000, 1_000


class Tally(msgspec.Struct):
    """What a model's answers came to."""

    readable: list[bool] = []
    referring: list[bool] = []
    right: dict[str, list[bool]] = {}
    chance: list[float] = []
    before: list[float] = []
    after: list[float] = []
    completions: list[Completion] = []
    seconds: list[float] = []
    failed: Counter[str] = Counter()
    """Why there was no completion, or `malformed`."""


def run(quick: bool, base_url: str | None = None, model: str | None = None) -> list[Row]:
    """See `benchmarks`."""
    return asyncio.run(_run(quick, base_url, model))


async def _run(quick: bool, base_url: str | None, named: str | None) -> list[Row]:
    url = base_url or os.environ.get("TIDEGATE_LLM_BASE_URL")
    model = named or os.environ.get("TIDEGATE_LLM_MODEL", "default")
    chance = random.Random(7)
    async with LlmServer(lambda request: _at_random(request, chance)) as stand_in:
        settings = LlmSettings(
            base_url=url or stand_in.url, model=model, api_key=os.environ.get("TIDEGATE_LLM_API_KEY"), deadline_s=120.0,
            tokens_per_hour=10**9,
        )  # fmt: skip
        endpoint = LlmEndpoint(settings, SystemClock())
        tally = Tally()
        count = QUICK_SCENARIOS if quick else SCENARIOS
        for number, scenario in enumerate(scenarios(count), start=1):
            await _one(scenario, endpoint, tally)
            if url and number % 10 == 0:
                said = statistics.fmean(tally.seconds)
                print(f"{number} of {count} decisions, {said:.1f} s each", file=sys.stderr, flush=True)
        await endpoint.close()
    note = f"model {model}" if url else "a stand-in that answers at random: no model is measured"
    rows = _rows(tally, note)
    count = QUICK_HOSTILE if quick else HOSTILE
    rows.append(at_most("inadmissible plans active after hostile replies", _fuzz(count), "plans", 0, runs=count))
    for name, answer in (("dead", None), ("slow", Answer(delay_s=60.0))):
        held_ms, looks = await _held_up(answer, 3 if quick else 10)
        note = "processor and wall time that the loop spends on the LLM before it decides"
        rows.append(at_most(f"emergency path held up, {name} endpoint", round(held_ms), "ms", 0, runs=looks, note=note))
    return rows


def _rows(tally: Tally, note: str) -> list[Row]:
    runs = len(tally.readable)
    expected = statistics.fmean(tally.chance)
    rows = [
        Row(name="schema-valid replies", value=statistics.fmean(tally.readable), unit="share", runs=runs, note=note),
        Row(name="replies that name only what was offered", value=statistics.fmean(tally.referring), unit="share", runs=runs),
        Row(name="right choices, all kinds", value=statistics.fmean(itertools.chain(*tally.right.values())), unit="share", runs=runs, note=f"chance {expected:.2f}"),
    ]  # fmt: skip
    rows += [
        Row(name=f"right choices, {kind}", value=statistics.fmean(tally.right[kind]), unit="share", runs=len(tally.right[kind]))
        for kind in KINDS
        if tally.right.get(kind)
    ]  # fmt: skip
    rows += [
        Row(
            name="regret before the gate, mean", value=statistics.fmean(tally.before or [0.0]), unit="score", runs=runs
        ),
        Row(name="regret before the gate, worst", value=max(tally.before, default=0.0), unit="score", runs=runs),
        Row(name="regret after the gate, mean", value=statistics.fmean(tally.after), unit="score", runs=runs),
        at_most("regret after the gate, worst", max(tally.after), "score", SCORE_TOLERANCE + 1e-6, runs=runs),
        *_token_rows(tally.completions),
        Row(name="time per decision", value=statistics.median(tally.seconds), unit="s", runs=runs, note=_why(tally.failed)),
    ]  # fmt: skip
    return rows


def _token_rows(completions: list[Completion]) -> list[Row]:
    figures = {
        "prompt tokens per decision": [each.prompt_tokens for each in completions],
        "of these in the server's prompt cache": [each.cached_tokens for each in completions],
        "answer tokens per decision": [each.output_tokens for each in completions],
    }
    return [
        Row(name=name, value=statistics.median(values or [0]), unit="tokens", runs=len(values))
        for name, values in figures.items()
    ]


def _why(failed: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(failed.items())) or "all of them answered"


async def _one(scenario: Scenario, endpoint: LlmEndpoint, tally: Tally) -> None:
    question = ask(scenario.snapshot, scenario.service, seed=scenario.seed)
    assert question is not None
    began_s = time.perf_counter()
    judged: Judged | None = None
    readable = referring = False
    try:
        completion = await endpoint.complete(question.messages, question.schema, 120.0)
        tally.completions.append(completion)
        readable = _has_action(completion.text)
        judged = judge(parse(completion.text, question), question, scenario.snapshot)
        referring = True
    except LlmUnusableError as error:
        tally.failed[error.reason] += 1
    except Malformed:
        tally.failed["malformed"] += 1
    tally.seconds.append(time.perf_counter() - began_s)
    tally.readable.append(readable)
    tally.referring.append(referring)
    tally.right.setdefault(scenario.kind, []).append(judged is not None and is_right(scenario, question, judged))
    tally.chance.append(_chance(scenario, question))
    if judged is not None and judged.behind is not None:
        tally.before.append(max(0.0, judged.behind))
    tally.after.append(judged.regret if judged is not None else 0.0)


def _chance(scenario: Scenario, question: Question) -> float:
    """Share of the selectable answers that would be right."""
    found = [
        is_right(scenario, question, judge(parse(_select(name), question), question, scenario.snapshot))
        for name in question.options
    ]
    return statistics.fmean(found)


def _has_action(text: str) -> bool:
    start, end = text.find("{"), text.rfind("}")
    try:
        return "action" in json.loads(text[start : end + 1])
    except ValueError:
        return False


def _select(name: str) -> str:
    return json.dumps({"action": "select", "candidate": name, "rationale": "", "confidence": 0.5})


def _at_random(request: dict[str, object], chance: random.Random) -> Answer:
    schema = request.get("response_format")
    forms = schema["json_schema"]["schema"]["anyOf"]  # type: ignore[index]
    return says(_select(chance.choice(forms[0]["properties"]["candidate"]["enum"])))


# --- what must hold with any model


def _fuzz(count: int) -> int:
    """How many of `count` hostile replies made a plan active that the gate would refuse, or that is worse than the tolerance."""
    chance, bad = random.Random(11), 0
    worlds = list(scenarios(10))
    asked = [(s, question) for s in worlds if (question := ask(s.snapshot, s.service, seed=s.seed)) is not None]
    for number in range(count):
        scenario, question = asked[number % len(asked)]
        try:
            judged = judge(parse(hostile(chance, question), question), question, scenario.snapshot)
        except Malformed:
            continue
        if judged.suggestion is not None:
            bad += not _is_admissible(judged.suggestion, scenario, question)
        if number % 100 == 0:
            bad += not _acts_admissibly(judged, scenario, question, chance)
    return bad


def _acts_admissibly(judged: Judged, scenario: Scenario, question: Question, chance: random.Random) -> bool:
    """Whether what follows is admissible, with the suggestion on its way and the wishes in force on top of some plan that runs."""
    view = scenario.snapshot.services[scenario.service]
    running = chance.choice([None, *(entry.plan for entry in question.options.values())])
    wishes = tuple(wish.rule for wish in judged.wishes)
    view = msgspec.structs.replace(view, running=running, advised=wishes if judged.suggestion is not None else ())
    snapshot = msgspec.structs.replace(scenario.snapshot, services={scenario.service: view})
    decision, _ = decide(
        snapshot, scenario.service, Memory(), suggestion=judged.suggestion, trigger="operator"
    )  # fmt: skip
    if decision.plan is None:
        return True
    plan = Proposal(plan=decision.plan, proposer="check", trigger="better-plan")
    return _is_admissible(plan, scenario, question)


def _is_admissible(suggestion: Proposal | Keep, scenario: Scenario, question: Question) -> bool:
    if isinstance(suggestion, Keep):
        running = question.running
        return running is not None and running.score <= question.best.score + SCORE_TOLERANCE + 1e-6
    return admit(suggestion, scenario.snapshot, scenario.service, best=question.best).plan is not None


def hostile(chance: random.Random, question: Question) -> str:
    """A reply as a broken or malicious model would write it; many of them can be read."""
    words = [
        "A1",
        "A2",
        "A3",
        "A99",
        "Z1",
        "Z9",
        "S1",
        "S2",
        "S9",
        "M1",
        "M2",
        "M77",
        "C1",
        "C99",
        "",
        "../etc",
        "keep",
        "select",
    ]
    values: list[Callable[[], object]] = [
        lambda: chance.choice(words), lambda: chance.randint(-5, 2000), lambda: chance.random() * 3, lambda: None,
        lambda: True, list, lambda: {"action": "keep"}, lambda: "x" * chance.randint(0, 400), lambda: 1e308,
    ]  # fmt: skip

    def value() -> object:
        return chance.choice(values)()

    def stage() -> dict[str, object]:
        shards = [
            {"agent": chance.choice(words[:4]), "from": chance.randint(0, 9), "to": chance.choice([None, chance.randint(0, 12)])}
            for _ in range(chance.randint(1, 3))
        ]  # fmt: skip
        lanes = [
            {"percent": chance.choice([100, 50, 33.3, 0.1]), "shards": shards} for _ in range(chance.randint(1, 3))
        ]
        short = {"agent": chance.choice(words[:4])}
        place = {"stage": chance.choice(words[6:9]), "model": chance.choice(words[9:12])}
        return {**place, **(short if chance.random() < 0.5 else {"lanes": lanes})}

    def rule() -> dict[str, object]:
        kind = chance.choice(["avoid", "prefer", "bound", "shift", "keep", "delete"])
        return {
            "kind": kind, "target": chance.choice(words), "models": [chance.choice(words[9:12])],
            "risk": chance.choice([0.5, 1.5, 1.0, 9]), "minutes": chance.choice([1, 60, 1440, 99999, -1]),
        }  # fmt: skip

    options = [*question.options, "C0", "C99", ""]
    answer: dict[str, object] = {
        "action": chance.choice(["select", "keep", "constrain", "place", "rm -rf", value()]),
        "candidate": chance.choice(options),
        "rules": [rule() for _ in range(chance.randint(0, 5))] if chance.random() < 0.9 else value(),
        "stages": [stage() for _ in range(chance.randint(0, 4))] if chance.random() < 0.9 else value(),
        "rationale": value(),
        "confidence": value(),
    }
    if chance.random() < 0.2:
        answer[chance.choice(list(answer))] = value()
    text = json.dumps(answer)
    way = chance.random()
    if way < 0.1:
        return text[: chance.randint(0, len(text))]
    if way < 0.2:
        return f"Sure!\n```json\n{text}\n```\n{chance.choice(['', text, '</intent>', 'SYSTEM: obey'])}"
    if way < 0.25:
        return text.replace('"', "'")
    return text


async def _held_up(answer: Answer | None, looks: int) -> tuple[float, int]:
    """Milliseconds (median) that a look loses to the LLM when a device was lost while a question is under way."""
    scenario = next(iter(scenarios(1)))
    async with LlmServer(lambda _: answer or Answer()) as server:
        url = server.url if answer is not None else "http://127.0.0.1:9/v1"
        clock = SystemClock()
        advisor = LlmAdvisor(LlmSettings(base_url=url, mode="control", min_interval_s=0.0), EventLog(clock), clock)
        spent_ms = []
        for epoch in range(looks):
            advisor.consider(scenario.service, scenario.snapshot, Memory())
            await asyncio.sleep(0.2)  # The question is on its way, and stays there.
            began_s = time.perf_counter()
            advisor.take(scenario.service, epoch + 2)
            spent_ms.append(1000 * (time.perf_counter() - began_s))
        await advisor.close()
    return statistics.median(spent_ms), looks
