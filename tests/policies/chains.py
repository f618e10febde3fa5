"""Works small enough to look at all their placements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from hypothesis import strategies as st

from policies.partition import Objective, Route, Work, bottleneck_of, latency_of, memory_of


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


def every_route(count: int, blocks: int) -> list[Route]:
    found: list[Route] = []
    for used in range(1, min(count, blocks) + 1):
        for order in itertools.permutations(range(count), used):
            for cuts in itertools.combinations(range(1, blocks), used - 1):
                bounds = [0, *cuts, blocks]
                found.append(tuple((d, *span) for d, span in zip(order, itertools.pairwise(bounds), strict=True)))
    return found


def tiny_work(rng: np.random.Generator, count: int, blocks: int) -> Work:
    return Work(
        run=np.concatenate([np.zeros((count, 1)), rng.uniform(1, 9, (count, blocks)).cumsum(axis=1)], axis=1),
        params=np.concatenate([[0.0], rng.uniform(1, 5, blocks).cumsum()]), active=rng.uniform(0, 1),
        enter=np.where(rng.random(count) < 0.2, np.inf, rng.uniform(0, 5, count)),
        hop=np.where(rng.random((count, count, 1)) < 0.1, np.inf, rng.uniform(0, 5, (count, count, blocks + 1))),
        enter_busy=rng.uniform(0, 5, count), hop_busy=rng.uniform(0, 5, (count, count, blocks + 1)),
        rate=rng.uniform(0.5, 2.0),
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, works: int = 3) -> tuple[list[Work], np.ndarray, np.ndarray]:
    """Works, room and load before; some entries and hops are forbidden, and often little or nothing fits."""
    count, most = draw(st.integers(1, 3)), draw(st.integers(1, works))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    made = [tiny_work(rng, count, int(rng.integers(1, 5))) for _ in range(most)]
    return made, rng.uniform(2, 9, count) * most, rng.uniform(0, 9, count) * (rng.random() < 0.5)


def is_allowed(work: Work, route: Route) -> bool:
    return bool(np.isfinite(latency_of(work, route)))


def fits(works: Sequence[Work], routes: Sequence[Route], room: np.ndarray) -> bool:
    held = sum((memory_of(w, r) for w, r in zip(works, routes, strict=True)), np.zeros(len(room)))
    return bool((held <= room * (1 + 1e-9)).all())


def every_placement(works: Sequence[Work], room: np.ndarray) -> Iterator[tuple[Route, ...]]:
    allowed = [
        [r for r in every_route(w.devices, w.blocks) if is_allowed(w, r) and fits([w], [r], room)] for w in works
    ]
    return (routes for routes in itertools.product(*allowed) if fits(works, routes, room))


def value_of(works: Sequence[Work], routes: Sequence[Route], objective: Objective, base: np.ndarray) -> float:
    if objective == "throughput":
        return bottleneck_of(works, routes, base)
    return sum(w.rate * latency_of(w, r) for w, r in zip(works, routes, strict=True))


def least_value(works: Sequence[Work], room: np.ndarray, objective: Objective, base: np.ndarray) -> float | None:
    return min((value_of(works, routes, objective, base) for routes in every_placement(works, room)), default=None)
