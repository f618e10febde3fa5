"""Requests whose fate follows public traces: arrivals of an LLM service over a Starlink link, second by second.

The traces are not part of the repository: `TIDEGATE_TRACES` names their directory, `../shared/traces` is looked at otherwise; where
there are none, a generator makes links with calm and bad spells. Fixed seeds, so that two runs see the same requests.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sla.errors import SettingsError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ARRIVALS = "arrivals_azure_llm_2023_conv.csv.gz"
LINKS = "net_fjordlink_starlink_*.csv.gz"
COMPUTE_MS = 25.0
"""Median time of the service itself."""


class Replay(msgspec.Struct, frozen=True):
    """Requests of one day, ordered by arrival."""

    name: str
    second: Ints
    """When each arrived."""
    latency_ms: Floats
    failed: npt.NDArray[np.bool_]

    def seconds(self) -> int:
        return int(self.second[-1]) + 1

    def minute(self, number: int) -> slice:
        """The requests of one minute."""
        low, high = np.searchsorted(self.second, [60 * number, 60 * number + 60])
        return slice(int(low), int(high))


def trace_directory() -> Path | None:
    """Where the traces are, None if there are none. Raises SettingsError when the named directory does not exist."""
    named = os.environ.get("TIDEGATE_TRACES")
    if named is not None:
        if not Path(named).is_dir():
            raise SettingsError(f"TIDEGATE_TRACES names {named}, which is not a directory.")
        return Path(named)
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    return beside if (beside / ARRIVALS).is_file() else None


def replays(limit: int = 4) -> Iterator[Replay]:
    """Days of requests, from traces or from the generator."""
    directory = trace_directory()
    if directory is None:
        for seed in range(limit):
            yield _requests(f"generated {seed}", *_generated(seed), _poisson(seed), seed)
        return
    arrivals = np.bincount(_column(directory / ARRIVALS, "t_s").astype(np.int64))
    for seed, path in enumerate(sorted(directory.glob(LINKS))[:limit]):
        rtt_ms, lost = _column(path, "rtt_ms"), _column(path, "drop_rate")
        yield _requests(path.name.removesuffix(".csv.gz"), rtt_ms, lost, arrivals, seed)


def _requests(name: str, rtt_ms: Floats, lost: Floats, per_second: Ints, seed: int) -> Replay:
    chance = np.random.default_rng(seed)
    second = np.repeat(np.arange(len(rtt_ms)), np.resize(per_second, len(rtt_ms)))
    compute = chance.lognormal(math.log(COMPUTE_MS), 0.25, len(second))
    return Replay(name, second, rtt_ms[second] + compute, chance.random(len(second)) < lost[second])


def _generated(seed: int, hours: float = 10.0) -> tuple[Floats, Floats]:
    """Round trips and losses of a link whose level drifts over minutes and that is bad for a while now and then."""
    chance = np.random.default_rng(1000 + seed)
    seconds = round(hours * 3600)
    level = np.empty(seconds)
    at = 0.0
    for second, step in enumerate(chance.normal(0.0, 1.0, seconds)):
        at += -at / 900.0 + 0.008 * step
        level[second] = at
    is_bad = np.zeros(seconds, dtype=np.bool_)
    for start in np.flatnonzero(chance.random(seconds) < 1 / 5400.0):
        is_bad[start : start + round(float(chance.exponential(300.0)))] = True
    rtt_ms = np.exp(math.log(29.0) + level + chance.normal(0.0, 0.2, seconds)) * np.where(is_bad, 1.5, 1.0)
    return rtt_ms, np.where(is_bad, 0.02, 0.0004)


def _poisson(seed: int) -> Ints:
    return np.random.default_rng(2000 + seed).poisson(5.5, 3600)


def _column(path: Path, name: str) -> Floats:
    with gzip.open(path, "rt", newline="") as lines:
        return np.array([float(row[name]) for row in csv.DictReader(lines)])
