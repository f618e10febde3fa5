"""The simulated queue against the real one: the same runs go in the same order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agents.queue import MODALITY_WEIGHT, Modality, Ticket, WaitingLine
from policies.simulate_queue import TEXT_WEIGHT, VISION_WEIGHT, Job, Line, Threads


def _ignored(_end: float | None, _now: float) -> None:
    return None


jobs = st.lists(
    st.tuples(st.integers(1_000, 40_000), st.integers(1, 400), st.booleans()), min_size=1, max_size=12,
    unique_by=lambda job: job[0] - job[1],
)  # fmt: skip


@given(jobs=jobs)
def test_it_serves_in_the_order_of_the_real_queue(jobs: list[tuple[int, int, bool]]) -> None:
    line, real = Line(), WaitingLine[str](max_depth=64)
    for due_ms, expected_ms, is_text in jobs:
        name = f"{due_ms}-{expected_ms}"
        line.push(Job(expected_ms, due_ms, is_text, _ignored, key=name), expected_ms)
        modality: Modality = "text" if is_text else "vision"
        real.tickets.append(Ticket(name, modality, due_ms / 1000, expected_ms / 1000, 0.0))
    for _ in jobs:
        job, (ticket, _shed) = line.pop(0.0), real.pop(0.0)
        assert job is not None
        assert ticket is not None
        assert job.key == ticket.payload
    assert line.pop(0.0) is None


def test_the_weights_are_those_of_the_agents() -> None:
    assert {"vision": VISION_WEIGHT, "text": TEXT_WEIGHT}.items() <= MODALITY_WEIGHT.items()


def test_threads_serve_side_by_side_and_then_in_turn() -> None:
    threads = Threads([0.0, 0.0])
    assert [threads.end_ms(10.0, 5.0), threads.end_ms(11.0, 5.0), threads.end_ms(12.0, 5.0)] == [15.0, 16.0, 20.0]
