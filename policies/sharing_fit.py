"""Beside which of many choices for the other works one more work may find a place: a test that is quick and never too strict."""

from __future__ import annotations

import numpy as np

from policies.latency import Floats
from policies.layouts import Ints
from policies.partition import Work


def may_fit(work: Work, room: Floats, spare: Floats, at_most: float) -> np.ndarray:
    """[N] whether the work may fit where the others leave `room` [N, D] bytes and `spare` [N, D] load; links carry `at_most`.

    Per set of devices only the furthest block is kept that its devices can reach one after the other in any order. That takes a chain
    to be able to stop at every block before, and each hop to come from whichever device may make it, so a "yes" must be looked at
    more closely; a "no" is certain.
    """
    choices, devices = room.shape
    offset = np.arange(choices) * (work.blocks + 1)
    reach = [_reach(work, d, room[:, d], spare[:, d], at_most).ravel() for d in range(devices)]
    furthest = np.zeros((1 << devices, choices), dtype=np.int64)
    for mask in range((1 << devices) - 1):
        position = furthest[mask] + offset
        for d in range(devices):
            more = mask | (1 << d)
            if more != mask:
                np.maximum(furthest[more], reach[d].take(position), out=furthest[more])
    return np.asarray(furthest[-1] == work.blocks)


def _reach(work: Work, d: int, room: Floats, spare: Floats, at_most: float) -> Ints:
    """[N, B+1] up to which block the chain is done once device `d` has gone on from each block."""
    blocks = np.arange(work.blocks + 1)
    load = work.rate * work.run[d]
    stop_load = np.searchsorted(load, load[None, :] + spare[:, None], side="right") - 1
    stop_bytes = np.searchsorted(work.params, work.params[None, :] + (room - work.active)[:, None], side="right") - 1
    stop = np.minimum(stop_load, stop_bytes)
    busy = np.where(np.isfinite(work.hop[:, d]), work.rate * work.hop_busy[:, d], np.inf)
    busy[d] = np.inf
    is_open = busy.min(axis=0) <= at_most
    is_open[0] = np.isfinite(work.enter[d]) and work.rate * work.enter_busy[d] <= at_most
    start = np.maximum.accumulate(np.where(is_open, blocks, -1))
    return np.maximum(np.where(start >= 0, stop[:, start], 0), blocks)
