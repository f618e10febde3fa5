"""A recorded exchange decided again from its snapshot and its replies, without the endpoint."""

from __future__ import annotations

import msgspec

from controller.llm import judged_exchange
from controller.llm_records import Exchange
from controller.snapshots import snapshot_from
from policies.llm import Malformed, ask, parse
from policies.llm_judge import Judged, judge
from policies.llm_reply import Answer


class ReplayedExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The same question, the same replies: did they come to the same?"""

    exchange: Exchange
    same_prompt: bool
    same_decision: bool
    text: str
    """One sentence."""
    is_gone: bool = False
    """Its snapshot is not kept any more."""


def replayed(exchange: Exchange, snapshot: bytes | None) -> ReplayedExchange:
    """What the exchange comes to today."""
    if snapshot is None:
        told = _told(exchange, False, False, "its snapshot is not kept any more")
        return msgspec.structs.replace(told, is_gone=True)
    world = snapshot_from(snapshot)
    question = ask(
        world, exchange.service_id, seed=exchange.seed, outcomes=exchange.outcomes, limit=exchange.candidates
    )
    if question is None:
        return _told(exchange, False, False, "there is nothing to choose in its snapshot")
    same_prompt = tuple(question.messages) == exchange.messages
    answer: Answer | None = None
    judged: Judged | None = None
    for reply in exchange.replies:
        try:
            answer = parse(reply, question)
            judged = judge(answer, question, world, exchange.minute_of_day)
        except Malformed:
            continue
    again = exchange
    if exchange.verdict != "fallback" and judged is not None:
        again = judged_exchange(exchange, question, judged)
        again = msgspec.structs.replace(again, answer=answer)
    same = again == exchange and (judged is not None or exchange.verdict == "fallback")
    same = same and not (judged is not None and exchange.reason == "malformed")
    text = f"{exchange.verdict}{f' ({exchange.reason})' if exchange.reason else ''}"
    return _told(
        exchange, same_prompt, same, text if same else f"{text}, but now {again.verdict} {again.reason}".rstrip()
    )


def _told(exchange: Exchange, same_prompt: bool, same: bool, text: str) -> ReplayedExchange:
    return ReplayedExchange(exchange=exchange, same_prompt=same_prompt, same_decision=same, text=text)
