"""The linear planning problem as a mixed-integer programme for HiGHS: the referee of `policies.partition`.

Per work, a layered graph: node (block, device), arcs between consecutive blocks; one unit flows from the entry to the last block.
A device is entered at most once (one contiguous run), memory is a knapsack over all works, and the objective is the sum of
run and link times, or a bound on the load of every device and link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import highspy
import numpy as np

from policies.latency import Floats
from policies.partition import Objective, Work

_SCALE_BYTES = 1e-6


def random_problem(rng: np.random.Generator) -> tuple[list[Work], Floats]:
    """Up to 8 devices, 24 blocks and 3 works that share them; memory is often short."""
    devices, services = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    blocks = [int(rng.integers(3, 25)) for _ in range(services)]
    speed = rng.uniform(1.0, 10.0, devices)
    sizes = [rng.uniform(1e6, 20e6, n) for n in blocks]
    total = float(sum(s.sum() for s in sizes))
    free = rng.dirichlet(np.full(devices, 2.0)) * total * rng.uniform(1.1, 3.0)
    rtt = rng.uniform(0.5, 20.0, (devices, devices))
    rtt = (rtt + rtt.T) / 2
    per_byte = 1e3 / rng.uniform(5e6, 100e6, (devices, devices))
    return [_work(rng, speed, size, rtt, per_byte) for size in sizes], free


def _work(rng: np.random.Generator, speed: Floats, size: Floats, rtt: Floats, per_byte: Floats) -> Work:
    devices, count = len(speed), len(size)
    own = speed * rng.uniform(0.8, 1.25, devices)  # no two models see the same ratio of two devices
    run = np.concatenate(
        [np.zeros((devices, 1)), np.cumsum(own[:, None] * rng.uniform(0.5, 8.0, count), axis=1)], axis=1
    )
    cut = rng.uniform(1e3, 5e5, count + 1)
    transfer = per_byte[:, :, None] * cut
    entry = int(rng.integers(devices))
    at_entry = np.arange(devices) == entry
    enter_busy = np.where(at_entry, 0.0, per_byte[entry] * cut[0])
    return Work(
        run=run, params=np.concatenate([[0.0], np.cumsum(size)]), active=float(rng.uniform(0, 2e6)),
        enter=1.0 + np.where(at_entry, 0.0, rtt[entry]) + enter_busy, hop=1.0 + rtt[:, :, None] + transfer,
        enter_busy=enter_busy, hop_busy=transfer, rate=float(rng.uniform(0.5, 2.0)),
    )  # fmt: skip


def optimum(
    works: Sequence[Work], free: Floats, objective: Objective, *, seconds: float = 10.0
) -> tuple[bool, float | None]:
    """Whether the answer is proven (to 0.01 %), and the best value; None when there is no plan."""
    h = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("threads", 1)
    h.setOptionValue("time_limit", seconds)
    h.setOptionValue("mip_rel_gap", 1e-4)
    devices = range(len(free))
    worst = h.addVariable(lb=0.0) if objective == "throughput" else None
    held: list[list[Any]] = [[] for _ in devices]
    busy: list[list[Any]] = [[] for _ in devices]
    costs: list[Any] = []
    for work in works:
        _add(h, work, held, busy, costs, worst)
    for d in devices:
        if held[d]:
            h.addConstr(h.qsum(held[d]) <= float(free[d]) * _SCALE_BYTES)
        if worst is not None and busy[d]:
            h.addConstr(h.qsum(busy[d]) <= worst)
    h.minimize(worst if worst is not None else h.qsum(costs))
    status = h.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return True, None
    info = h.getInfo()
    if info.primal_solution_status != 2:
        return False, None
    return status == highspy.HighsModelStatus.kOptimal, float(info.objective_function_value)


def _add(
    h: Any, work: Work, held: list[list[Any]], busy: list[list[Any]], costs: list[Any], worst: Any
) -> None:  # fmt: skip
    devices, blocks = range(work.devices), work.blocks
    at = [[h.addBinary() for _ in devices] for _ in range(blocks)]
    used = [h.addVariable(lb=0.0, ub=1.0) for _ in devices]
    h.addConstr(h.qsum(at[0]) == 1)
    entered: list[list[Any]] = [[at[0][d]] for d in devices]
    size, time = np.diff(work.params), np.diff(work.run, axis=1)
    for d in devices:
        costs.append(work.rate * float(work.enter[d]) * at[0][d])
        if worst is not None:
            h.addConstr(work.rate * float(work.enter_busy[d]) * at[0][d] <= worst)
    for b in range(1, blocks):
        arcs = {(c, d): h.addVariable(lb=0.0, ub=1.0) for c in devices for d in devices}
        for d in devices:
            h.addConstr(h.qsum([arcs[d, e] for e in devices]) == at[b - 1][d])
            h.addConstr(h.qsum([arcs[e, d] for e in devices]) == at[b][d])
            entered[d] += [arcs[e, d] for e in devices if e != d]
        for (c, d), arc in arcs.items():
            if c != d:
                costs.append(work.rate * float(work.hop[c, d, b]) * arc)
        if worst is not None:
            moved = [work.rate * float(work.hop_busy[c, d, b]) * arc for (c, d), arc in arcs.items() if c != d]
            h.addConstr(h.qsum(moved) <= worst)
    for d in devices:
        h.addConstr(h.qsum(entered[d]) == used[d])
        held[d] += [float(size[b]) * _SCALE_BYTES * at[b][d] for b in range(blocks)]
        held[d].append(work.active * _SCALE_BYTES * used[d])
        runs = [work.rate * float(time[d, b]) * at[b][d] for b in range(blocks)]
        busy[d] += runs
        costs += runs
