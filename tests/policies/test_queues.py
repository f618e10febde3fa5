"""The wait in a queue against what is known of it, and against requests that queue one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ids import AgentId, StageName
from policies.latency import Grid, Queue, Track, pipeline
from policies.queues import Load, Spell, Visit, Wait, mean_wait_ms, shaped, spells_of, waits_of, work_ahead

runs = st.lists(st.tuples(st.floats(0.0001, 0.01), st.floats(0.1, 400.0), st.floats(0.0, 2.0)), min_size=1, max_size=5)


def _load(parts: list[tuple[float, float, float]]) -> Load:
    load = Load()
    for rate_per_ms, mean_ms, variation in parts:
        load.add(rate_per_ms, mean_ms, variation * mean_ms)
    return load


def queue_of(load: Load) -> Queue:
    """What a request that runs once, and no text, waits for in a queue by itself."""
    return shaped(work_ahead(load, Spell(AgentId("a"), visits=1)))


@given(parts=runs)
def test_the_wait_has_the_first_two_moments_of_the_queue(parts: list[tuple[float, float, float]]) -> None:
    load = _load(parts)
    if load.busy > 0.97:
        return
    queue = queue_of(load)
    assert 0.0 < queue.chance <= 1.0
    assert queue.mean_ms == mean_wait_ms(load)
    expected = 2.0 * queue.mean_ms**2 + load.third_ms2 / (3.0 * (1.0 - load.busy))
    assert queue.second_ms2() == pytest.approx(expected, rel=0.01)


def test_runs_of_exponential_length_make_an_exponential_wait() -> None:
    """M/M/1: the wait exceeds t with probability busy x exp(-(1 - busy) t / run)."""
    busy, run_ms = 0.6, 50.0
    load = Load(busy, busy / run_ms * 2 * run_ms**2, busy / run_ms * 6 * run_ms**3)
    queue = queue_of(load)
    assert queue.chance == pytest.approx(busy, rel=0.01)
    assert queue.shape == pytest.approx(1.0, abs=0.02)
    assert queue.scale_ms == pytest.approx(run_ms / (1.0 - busy), rel=0.01)


@given(a=runs, b=runs)
def test_loads_add_up(a: list[tuple[float, float, float]], b: list[tuple[float, float, float]]) -> None:
    one, other, both = _load(a), _load(b), _load(a + b)
    assert both.second_ms == pytest.approx(one.second_ms + other.second_ms)
    assert both.third_ms2 == pytest.approx(one.third_ms2 + other.third_ms2)


@pytest.mark.parametrize("busy", [0.2, 0.45, 0.65, 0.8])
@pytest.mark.parametrize("runs_ms", [(100.0,), (20.0, 180.0), (5.0, 50.0, 300.0)])
def test_the_tail_of_steady_runs_is_that_of_requests_that_queue(busy: float, runs_ms: tuple[float, ...]) -> None:
    rng = np.random.default_rng(5)
    count = 400_000
    rate_per_ms = busy / float(np.mean(runs_ms))
    gaps, work = rng.exponential(1.0 / rate_per_ms, count), rng.choice(runs_ms, count)
    # Lindley: a wait is the walk of work less gaps above its lowest point so far.
    walk = np.concatenate(([0.0], np.cumsum(work[:-1] - gaps[1:])))
    waits = walk - np.minimum.accumulate(walk)
    load = _load([(rate_per_ms / len(runs_ms), run_ms, 0.0) for run_ms in runs_ms])
    queue = queue_of(load)
    predicted = pipeline(Grid.up_to(40.0 * queue.mean_ms), Track(0.0, 0.0, (queue,)), [])
    assert predicted.mean_ms() == pytest.approx(float(waits.mean()), rel=0.08)
    assert predicted.quantile_ms(0.99) == pytest.approx(float(np.quantile(waits, 0.99)), rel=0.12)


def test_an_idle_agent_lets_nobody_wait() -> None:
    assert queue_of(Load(0.3)) == pytest.approx(Queue(0.3, 0.0))
    assert math.isclose(mean_wait_ms(Load()), 0.0)


def _visit(stage: int, agent: str, run_ms: float, *, text: bool = False, apart_ms: float = 0.0) -> Visit:
    return Visit(stage, StageName(f"s{stage}"), 0, AgentId(agent), run_ms, 0.0, text, True, True, apart_ms)


def _waits(visits: list[Visit], rate_per_ms: float) -> list[Wait]:
    spells = spells_of(visits)
    loads = {visit.agent: Load() for visit in visits}
    for spell in spells:
        loads[spell.agent].add_spell(rate_per_ms, spell)
    return waits_of(spells, loads)


def test_visits_without_a_pause_are_one_piece_of_work() -> None:
    together, alone = [_visit(0, "a", 40.0), _visit(1, "a", 60.0)], [_visit(0, "a", 100.0)]
    assert _waits(together, 0.005) == [w._replace(stage=StageName("s0")) for w in _waits(alone, 0.005)]


def test_visits_far_apart_wait_each_for_itself() -> None:
    apart = _waits([_visit(0, "a", 50.0), _visit(1, "a", 50.0, apart_ms=1e9)], 0.005)
    once = queue_of(_load([(0.01, 50.0, 0.0)]))
    assert apart[0].queue.mean_ms == pytest.approx(2.0 * once.mean_ms, rel=1e-3)


def test_text_waits_for_the_pictures_of_later_requests() -> None:
    pictures = _waits([_visit(0, "a", 60.0), _visit(1, "a", 40.0)], 0.005)
    with_text = _waits([_visit(0, "a", 60.0), _visit(1, "a", 40.0, text=True)], 0.005)
    assert [(wait.stage, wait.lane) for wait in with_text] == [("s0", 0), ("s1", 0)]
    assert with_text[0].queue.mean_ms == pytest.approx(pictures[0].queue.mean_ms)
    assert with_text[1].queue.mean_ms > 0.0


@given(
    visits=st.lists(st.tuples(st.sampled_from("abc"), st.floats(1.0, 100.0), st.booleans()), min_size=1, max_size=5),
    rates=st.tuples(st.floats(1e-5, 0.0018), st.floats(1e-5, 0.0018)),
)
def test_waits_grow_with_the_load(visits: list[tuple[str, float, bool]], rates: tuple[float, float]) -> None:
    path = [_visit(at, agent, run_ms, text=text, apart_ms=5.0) for at, (agent, run_ms, text) in enumerate(visits)]
    light, heavy = (sum(wait.queue.mean_ms for wait in _waits(path, rate)) for rate in sorted(rates))
    assert light <= heavy + 1e-9


def test_steps_of_the_ingress_let_nobody_wait() -> None:
    load = _load([(0.005, 60.0, 0.0)])
    before = queue_of(load)
    load.add_step(0.005, 40.0)
    assert queue_of(load) == before
    assert load.busy == pytest.approx(0.5)
