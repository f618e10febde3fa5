"""The order in front of an accelerator, with a clock that only moves when it is told."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.queue import AcceleratorQueue, RunTimes, Ticket, WaitingLine
from sla.errors import OverloadedError


def ticket(
    name: str, modality: str = "vision", deadline_s: float = 10.0, expected_s: float = 0.0, at_s: float = 0.0
) -> Ticket:
    return Ticket(name, modality, deadline_s, expected_s, at_s)


def order(*tickets: Ticket, now_s: float = 0.0) -> list[str]:
    line: WaitingLine = WaitingLine(100)
    for each in tickets:
        line.push(each)
    names = []
    while (chosen := line.pop(now_s)[0]) is not None:
        names.append(chosen.payload)
    return names


def test_less_slack_goes_first():
    assert order(ticket("late", deadline_s=9), ticket("soon", deadline_s=3), ticket("mid", deadline_s=6)) == [
        "soon",
        "mid",
        "late",
    ]


def test_at_equal_slack_vision_goes_before_text_and_speech_before_both():
    assert order(ticket("text", "text"), ticket("vision", "vision"), ticket("speech", "speech")) == [
        "speech",
        "vision",
        "text",
    ]


def test_text_with_little_slack_goes_before_vision_with_much():
    assert order(ticket("vision", "vision", 9), ticket("text", "text", 1)) == ["text", "vision"]


def test_equals_keep_their_order_of_arrival():
    assert order(ticket("a", at_s=0.0), ticket("b", at_s=0.1), ticket("c", at_s=0.2), now_s=1.0) == ["a", "b", "c"]


def test_a_full_line_says_when_to_come_back():
    line: WaitingLine = WaitingLine(2)
    line.push(ticket("a", expected_s=1.5))
    line.push(ticket("b", expected_s=1.5))
    with pytest.raises(OverloadedError, match="full") as caught:
        line.push(ticket("c", expected_s=1.5))
    assert caught.value.retry_after_s == pytest.approx(3.0)


def test_work_that_would_wait_beyond_its_deadline_is_not_taken():
    line: WaitingLine = WaitingLine(100)
    line.push(ticket("running late", deadline_s=5, expected_s=2), busy_for_s=2)
    with pytest.raises(OverloadedError, match="too long for this deadline by 1500 ms"):
        line.push(ticket("hopeless", deadline_s=4.5, expected_s=3), busy_for_s=3)
    line.push(ticket("interrupt", "speech", deadline_s=1), busy_for_s=0.5)


def test_what_cannot_meet_its_deadline_any_more_is_shed_when_its_turn_comes():
    line: WaitingLine = WaitingLine(100)
    line.push(ticket("gone", deadline_s=2, expected_s=1))
    line.push(ticket("fine", deadline_s=9, expected_s=1))
    chosen, hopeless = line.pop(1.5)
    assert chosen is not None
    assert (chosen.payload, [each.payload for each in hopeless]) == ("fine", ["gone"])


tickets = st.builds(
    ticket, name=st.integers(), modality=st.sampled_from(["vision", "speech", "text"]), deadline_s=st.floats(0, 20),
    expected_s=st.floats(0, 5),
)  # fmt: skip


@given(st.lists(tickets, max_size=30), st.lists(st.floats(0, 3), min_size=60, max_size=60))
def test_every_ticket_leaves_the_line_exactly_once(given_tickets, steps):
    line: WaitingLine = WaitingLine(20)
    taken, left, now_s = [], [], 0.0
    for each in given_tickets:
        try:
            line.push(each)
            taken.append(each)
        except OverloadedError:
            continue
        assert len(line.tickets) <= 20
    for step in steps:
        now_s += step
        chosen, hopeless = line.pop(now_s)
        left += hopeless + ([chosen] if chosen else [])
        if chosen:
            assert now_s + chosen.expected_s <= chosen.deadline_s
    assert sorted(map(id, left)) == sorted(map(id, taken))
    assert line.tickets == []


def test_a_run_of_a_new_size_is_expected_in_proportion():
    times = RunTimes()
    assert times.expected_s("shard") == 0.0
    times.ran("shard", 4.0, items=2)
    assert times.expected_s("shard", 3) == pytest.approx(6.0)
    times.doubt("shard")
    assert times.expected_s("shard", 3) == pytest.approx(4.8)
    times.forget("shard")
    assert times.expected_s("shard") == 0.0


@given(
    st.floats(0, 5),
    st.floats(0, 5),
    st.lists(st.integers(1, 50), min_size=2, max_size=20).filter(lambda n: len(set(n)) > 1),
)
def test_a_fixed_part_and_one_per_item_are_told_apart(fixed_s, each_s, sizes):
    times = RunTimes()
    for items in sizes:
        times.ran("shard", fixed_s + each_s * items, items)
    assert times.expected_s("shard", 25) == pytest.approx(fixed_s + each_s * 25, abs=1e-3)


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 10)), min_size=1, max_size=20), st.integers(1, 100))
def test_an_expectation_is_never_negative(runs, items):
    times = RunTimes()
    for size, seconds in runs:
        times.ran("shard", seconds, size)
    assert times.expected_s("shard", items) >= -1e-9


def test_what_is_remembered_is_bounded():
    times = RunTimes(max_keys=2)
    for key in "abc":
        times.ran(key, 1.0)
    assert [times.expected_s(key) for key in "abc"] == [0.0, 1.0, 1.0]


async def test_runs_go_one_at_a_time_in_order_of_urgency(clock):
    queue = AcceleratorQueue(clock=clock)
    gate, done = threading.Event(), []
    first = asyncio.create_task(queue.submit(lambda: gate.wait(10), deadline_s=99))
    await asyncio.sleep(0)
    rest = [
        asyncio.create_task(queue.submit(lambda name=name: done.append(name), deadline_s=deadline_s, modality=modality))
        for name, deadline_s, modality in (("text", 50, "text"), ("vision", 50, "vision"), ("urgent", 5, "vision"), ("stop", 90, "speech"))
    ]  # fmt: skip
    await asyncio.sleep(0)
    assert queue.depth == 5
    gate.set()
    await asyncio.gather(first, *rest)
    assert done == ["stop", "urgent", "vision", "text"]
    assert queue.depth == 0
    queue.close()


async def test_who_waits_too_long_is_told_so_and_errors_reach_their_caller(clock):
    queue = AcceleratorQueue(clock=clock)
    gate = threading.Event()
    first = asyncio.create_task(queue.submit(lambda: gate.wait(10), deadline_s=99))
    await asyncio.sleep(0)
    late = asyncio.create_task(queue.submit(lambda: None, deadline_s=2, expected_s=0.5))
    broken = asyncio.create_task(queue.submit(lambda: 1 // 0, deadline_s=99))
    await asyncio.sleep(0)
    clock.advance(3)
    gate.set()
    await first
    with pytest.raises(OverloadedError, match="waited 3000 ms"):
        await late
    with pytest.raises(ZeroDivisionError):
        await broken
    queue.close()


async def test_who_gives_up_leaves_the_line(clock):
    queue = AcceleratorQueue(clock=clock)
    gate = threading.Event()
    first = asyncio.create_task(queue.submit(lambda: gate.wait(10), deadline_s=99))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(queue.submit(lambda: pytest.fail("was run"), deadline_s=99))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert queue.depth == 1
    gate.set()
    await first
    queue.close()


async def test_the_busy_share_counts_the_recent_past(clock):
    queue = AcceleratorQueue(clock=clock)
    assert queue.busy_share() == 0.0
    await queue.submit(lambda: clock.advance(1.0), deadline_s=99)
    clock.advance(1.0)
    assert queue.busy_share(window_s=4.0) == pytest.approx(0.25)
    clock.advance(10.0)
    assert queue.busy_share(window_s=4.0) == 0.0
    queue.close()


async def test_closing_turns_away_who_waits(clock):
    queue = AcceleratorQueue(clock=clock)
    gate = threading.Event()
    first = asyncio.create_task(queue.submit(lambda: gate.wait(10), deadline_s=99))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(queue.submit(lambda: None, deadline_s=99))
    await asyncio.sleep(0)
    queue.close()
    with pytest.raises(OverloadedError, match="closing"):
        await waiting
    gate.set()
    await first
    with pytest.raises(OverloadedError, match="closing"):
        await queue.submit(lambda: None, deadline_s=99)


def test_what_must_be_first_goes_before_speech():
    proof = Ticket("proof", "vision", 60.0, 0.0, 5.0, True)
    assert order(ticket("speech", "speech", 1), proof) == ["proof", "speech"]
