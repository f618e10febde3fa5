"""The linear core of planning, against known answers and against brute force; `test_referee` holds it against HiGHS."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.partition import Route, Work, best_route, bottleneck_of, latency_of, memory_of
from policies.sharing import best_routes


def chain(per_block_ms: list[float], blocks: int, **changes: object) -> Work:
    """Blocks that take one byte each, on devices whose links cost nothing."""
    count = len(per_block_ms)
    values: dict[str, object] = {
        "run": np.array(per_block_ms)[:, None] * np.arange(blocks + 1)[None, :],
        "params": np.arange(blocks + 1, dtype=np.float64),
        "active": 0.0,
        "enter": np.zeros(count),
        "hop": np.zeros((count, count, blocks + 1)),
        "enter_busy": np.zeros(count),
        "hop_busy": np.zeros((count, count, blocks + 1)),
    }
    return Work(**{**values, **changes})  # type: ignore[arg-type]


def layers(route: Route, devices: int) -> list[int]:
    taken = {d: stop - start for d, start, stop in route}
    return [taken.get(d, 0) for d in range(devices)]


def test_the_slowest_stage_and_the_sum_are_different_objectives() -> None:
    """exo issue 957, 40 layers on five machines. The times per layer are derived from the printed figures: 12 layers at 2.907 ms
    are the 34.88 ms of the split by memory, 10 of them the 29.07 ms; the others give the sums 138.4 and 132.6 ms."""
    machines = [3.6993, 2.907, 3.3, 2.8, 5.807]
    work, room = chain(machines, 40), np.array([7.0, 12.0, 8.0, 10.0, 6.0])
    fast = best_route(work, room, "throughput")
    short = best_route(work, room, "latency")
    assert fast is not None
    assert short is not None
    assert layers(fast, 5) == [7, 10, 8, 10, 5]
    assert bottleneck_of([work], [fast]) == pytest.approx(29.07, abs=0.005)
    assert latency_of(work, fast) == pytest.approx(138.4, abs=0.05)
    assert layers(short, 5) == [7, 12, 8, 10, 3]
    assert bottleneck_of([work], [short]) == pytest.approx(34.88, abs=0.005)
    assert latency_of(work, short) == pytest.approx(132.6, abs=0.05)


def test_one_device_and_leaving_one_out_are_legal() -> None:
    """exo issue 489: two machines joined are slower than the better one."""
    hop = np.full((2, 2, 11), 30.0)
    work = chain([2.5, 5.0], 10, hop=hop)
    assert best_route(work, np.array([99.0, 99.0]), "latency") == ((0, 0, 10),)


def test_nothing_fits() -> None:
    work = chain([1.0, 1.0], 10)
    assert best_route(work, np.array([4.0, 5.0]), "latency") is None
    assert best_routes([work, work], np.array([10.0, 9.0]), "throughput") is None


def test_two_works_find_room_only_together() -> None:
    """Each would take the fast device whole; only one of the two splits lets both fit."""
    a, b = chain([1.0, 4.0], 6), chain([1.0, 2.0], 6)
    room = np.array([6.0, 6.0])
    routes = best_routes([a, b], room, "latency")
    assert routes is not None
    assert sum(latency_of(w, r) for w, r in zip([a, b], routes, strict=True)) == pytest.approx(6.0 + 12.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Work], np.ndarray]:
    count, blocks, works = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    made = [
        Work(
            run=np.concatenate([np.zeros((count, 1)), rng.uniform(1, 9, (count, blocks)).cumsum(axis=1)], axis=1),
            params=np.concatenate([[0.0], rng.uniform(1, 5, blocks).cumsum()]), active=rng.uniform(0, 1),
            enter=rng.uniform(0, 5, count), hop=rng.uniform(0, 5, (count, count, blocks + 1)),
            enter_busy=rng.uniform(0, 5, count), hop_busy=rng.uniform(0, 5, (count, count, blocks + 1)),
            rate=rng.uniform(0.5, 2.0),
        )
        for _ in range(works)
    ]  # fmt: skip
    return made, rng.uniform(2, 16, count)


def every_route(count: int, blocks: int) -> list[Route]:
    found: list[Route] = []
    for used in range(1, min(count, blocks) + 1):
        for order in itertools.permutations(range(count), used):
            for cuts in itertools.combinations(range(1, blocks), used - 1):
                bounds = [0, *cuts, blocks]
                found.append(tuple((d, *span) for d, span in zip(order, itertools.pairwise(bounds), strict=True)))
    return found


@settings(max_examples=60, deadline=None)
@given(problem=problems(), objective=st.sampled_from(["latency", "throughput"]))
def test_never_far_from_brute_force(problem: tuple[list[Work], np.ndarray], objective: str) -> None:
    works, room = problem
    best = None
    for routes in itertools.product(*(every_route(w.devices, w.blocks) for w in works)):
        if (sum(memory_of(w, r) for w, r in zip(works, routes, strict=True)) <= room).all():
            total = sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))
            value = total if objective == "latency" else bottleneck_of(works, routes)
            best = value if best is None else min(best, value)
    found = best_routes(works, room, objective)  # type: ignore[arg-type]
    assert (found is None) == (best is None)
    if found is None or best is None:
        return
    assert (sum(memory_of(w, r) for w, r in zip(works, found, strict=True)) <= room * (1 + 1e-9)).all()
    ours = (
        sum(w.rate * latency_of(w, r) for w, r in zip(works, found, strict=True))
        if objective == "latency" else bottleneck_of(works, found)
    )  # fmt: skip
    assert ours <= best * (1.0 + 1e-9) if len(works) == 1 else ours <= best * 1.1
