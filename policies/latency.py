"""Latency as a whole distribution: probability mass on a uniform grid of milliseconds.

All distributions of one calculation share a `Grid`. What falls beyond the grid is kept in its last bin, so that the mass
always sums to one and a quantile is never under-stated by losing the tail.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BINS = 512
"""Resolution of a grid; a grid that spans three times the mean resolves it to about half a percent."""

_Z = np.linspace(-8.0, 8.0, 3201)
_PHI = np.array([0.5 * math.erfc(-z / math.sqrt(2.0)) for z in _Z])


def normal_cdf(z: Floats) -> Floats:
    """The standard normal distribution function, by table; error below 1e-5."""
    return np.asarray(np.interp(z, _Z, _PHI), dtype=np.float64)


def normal_cdf_at(z: float) -> float:
    """The standard normal distribution function of one number."""
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@dataclass(frozen=True, slots=True)
class Grid:
    """Points 0, step, 2*step, ... in milliseconds."""

    step_ms: float
    bins: int = BINS

    @staticmethod
    def up_to(horizon_ms: float, bins: int = BINS) -> Grid:
        """A grid that reaches to `horizon_ms`."""
        return Grid(max(horizon_ms, 1e-6) / (bins - 1), bins)

    def edges_ms(self) -> Floats:
        """Upper edges of the bins: half a step above each point."""
        return np.asarray((np.arange(self.bins) + 0.5) * self.step_ms, dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A distribution of milliseconds on a grid; build it with the functions below."""

    grid: Grid
    mass: Floats

    def mean_ms(self) -> float:
        return (float(self.mass @ _edges(self.grid.bins)) - 0.5) * self.grid.step_ms

    def std_ms(self) -> float:
        points = np.arange(self.grid.bins) * self.grid.step_ms
        mean = float(self.mass @ points)
        return math.sqrt(max(0.0, float(self.mass @ (points - mean) ** 2)))

    def quantile_ms(self, q: float) -> float:
        """The smallest time that a share `q` of requests does not exceed, interpolated inside its bin."""
        return self.quantiles_ms((q,))[0]

    def quantiles_ms(self, shares: Sequence[float]) -> list[float]:
        """`quantile_ms` of each share."""
        reached, found = np.cumsum(self.mass), []
        for q in shares:
            at = min(int(reached.searchsorted(q)), self.grid.bins - 1)
            below = float(reached[at - 1]) if at else 0.0
            inside = (q - below) / max(float(self.mass[at]), 1e-15)
            found.append(max(0.0, (at - 0.5 + min(1.0, max(0.0, inside))) * self.grid.step_ms))
        return found

    def exceeds(self, limit_ms: float) -> float:
        """Probability of more than `limit_ms`."""
        at = limit_ms / self.grid.step_ms + 0.5
        return 1.0 - float(np.interp(at, np.arange(self.grid.bins + 1), np.concatenate(([0.0], np.cumsum(self.mass)))))


def point(grid: Grid, value_ms: float) -> Distribution:
    """Always `value_ms`, spread over the two nearest points so that the mean is exact."""
    at = min(max(value_ms / grid.step_ms, 0.0), grid.bins - 1.0)
    low = min(int(at), grid.bins - 2)
    mass = np.zeros(grid.bins)
    mass[low], mass[low + 1] = 1.0 - (at - low), at - low
    return Distribution(grid, mass)


def lognormal(grid: Grid, mean_ms: float, std_ms: float) -> Distribution:
    """Right-skewed times with the given mean and standard deviation."""
    if mean_ms <= 0.0 or std_ms < 0.25 * grid.step_ms:
        return point(grid, mean_ms)
    sigma2 = math.log1p((std_ms / mean_ms) ** 2)
    mu, sigma = math.log(mean_ms) - sigma2 / 2.0, math.sqrt(sigma2)
    reached = normal_cdf((np.log(grid.edges_ms()) - mu) / sigma)
    return _from_cdf(grid, reached)


def waiting(grid: Grid, utilisation: float, mean_wait_ms: float) -> Distribution:
    """Time in a queue: none with probability 1 - utilisation, otherwise exponential, with the given overall mean."""
    busy = min(max(utilisation, 0.0), 1.0)
    if busy <= 0.0 or mean_wait_ms < 1e-3 * grid.step_ms:
        return point(grid, max(mean_wait_ms, 0.0))
    reached = 1.0 - busy * np.exp(-grid.edges_ms() * (busy / mean_wait_ms))
    return _from_cdf(grid, reached)


def series(parts: Sequence[Distribution]) -> Distribution:
    """The sum of independent times: their convolution."""
    if len(parts) == 1:
        return parts[0]
    grid = parts[0].grid
    spectrum = np.fft.rfft(np.stack([part.mass for part in parts]), 2 * grid.bins, axis=1).prod(axis=0)
    total = np.maximum(np.fft.irfft(spectrum, 2 * grid.bins), 0.0)
    mass = total[: grid.bins].copy()
    mass[-1] += max(0.0, 1.0 - float(mass.sum()))
    return Distribution(grid, mass / mass.sum())


def parallel(parts: Sequence[Distribution]) -> Distribution:
    """The slowest of independent times: the product of their distribution functions."""
    if len(parts) == 1:
        return parts[0]
    reached = np.cumsum(np.stack([part.mass for part in parts]), axis=1).prod(axis=0)
    return _from_cdf(parts[0].grid, reached)


def mixture(parts: Sequence[tuple[float, Distribution]]) -> Distribution:
    """One of several times, with probabilities in proportion to the weights."""
    total = sum(weight for weight, _ in parts)
    mass = sum((part.mass * (weight / total) for weight, part in parts), np.zeros(parts[0][1].grid.bins))
    return Distribution(parts[0][1].grid, mass)


def _from_cdf(grid: Grid, reached: Floats) -> Distribution:
    closed = np.minimum(reached, 1.0)
    closed[-1] = 1.0
    return Distribution(grid, np.maximum(_steps(closed), 0.0))


COUPLED: Final = 0.1
"""Share of requests that wait alike in all queues on their way. The same busy spell carries a request from queue to queue, so that waits
are not independent; fitted to requests that queue one by one, over all quantiles from p50 to p99."""
_LEVELS = np.linspace(0.0, 9.3, 94)
"""Levels -ln(1 - u) at which quantiles of waits are added and compared; they reach beyond the 9999th of 10,000 requests."""


class Queue(NamedTuple):
    """A wait with a Weibull tail: more than t with probability chance x exp(-(t / scale) ^ shape)."""

    chance: float
    mean_ms: float
    """Over all requests, those that do not wait included."""
    shape: float = 1.0

    @property
    def scale_ms(self) -> float:
        return self.mean_ms / (max(self.chance, 1e-6) * math.gamma(1.0 + 1.0 / self.shape))

    def second_ms2(self) -> float:
        """Its mean square."""
        return self.chance * self.scale_ms**2 * math.gamma(1.0 + 2.0 / self.shape)


@dataclass(frozen=True, slots=True)
class Track:
    """Things done one after the other: their summed run and link time, and the queues stood in."""

    mean_ms: float
    std_ms: float
    queues: tuple[Queue, ...] = ()

    def wait_ms(self) -> Floats:
        """Waits in all queues together at `_LEVELS`, if a request that waits long in one waits long in all."""
        total = np.zeros(len(_LEVELS))
        for queue in self.queues:
            if queue.mean_ms > 0.0:
                beyond = np.maximum(0.0, _LEVELS + math.log(queue.chance))
                total += queue.scale_ms * beyond ** (1.0 / queue.shape)
        return total


def pipeline(grid: Grid, alone: Track, stages: Sequence[Sequence[Track]]) -> Distribution:
    """The sum of `alone` and, for each stage, the slowest of its tracks.

    Runs and links are independent. Waits of the tracks of a stage are as alike as can be: a request enters all of its lanes at once, so
    the same requests are ahead of it in all queues. Waits of different stages are independent for most requests, see `COUPLED`.
    """
    return pipelines([Course(grid, alone, stages)])[0]


@dataclass(frozen=True, slots=True)
class Course:
    """One pipeline to put on its grid: see `pipeline`."""

    grid: Grid
    alone: Track
    stages: Sequence[Sequence[Track]]

    def tracks(self) -> list[Track]:
        return [self.alone, *(track for stage in self.stages for track in stage)]

    def is_held_up(self) -> bool:
        """Whether its queues are worth the while of asking how alike they are."""
        tracks = self.tracks()
        return sum(queue.mean_ms for track in tracks for queue in track.queues) > 0.01 * sum(
            track.mean_ms for track in tracks
        )

    def waits_ms(self) -> list[Floats]:
        """What the queues of each stage add to it, at `_LEVELS`."""
        added = []
        for stage in self.stages:
            if any(track.queues for track in stage):
                slowest = max(track.mean_ms for track in stage)
                added.append(np.max([track.mean_ms + track.wait_ms() for track in stage], axis=0) - slowest)
        return added


def pipelines(courses: Sequence[Course]) -> list[Distribution]:
    """`pipeline` of each course; all must have grids of equally many bins. One pass over all of them costs little more than one."""
    bins, edges = courses[0].grid.bins, _edges(courses[0].grid.bins)
    reached = _lognormals([(course.grid.step_ms, track) for course in courses for track in course.tracks()], bins)
    runs: list[Floats] = []
    levels: list[Floats] = []
    single: list[tuple[float, float, float]] = []
    """(chance, scale in steps, shape) of each."""
    owners: tuple[list[int], list[int], list[int]] = ([], [], [])
    """Whose the rows are: of runs, of waits as levels, and of waits in single queues."""
    together: dict[int, int] = {}
    at = 0
    for number, course in enumerate(courses):
        step = course.grid.step_ms
        for size in (1, *map(len, course.stages)):
            runs.append(reached[at] if size == 1 else reached[at : at + size].prod(axis=0))
            owners[0].append(number)
            at += size
        stages = course.waits_ms()
        queues = [(q.chance, q.scale_ms / step, q.shape) for q in course.alone.queues if q.mean_ms > 0.0]
        if len(stages) + len(queues) > 1 and course.is_held_up():
            together[number] = len(levels) + len(stages)
            stages.append(course.alone.wait_ms() + sum(stages))
        levels += [np.interp(edges, wait / step, _LEVELS) for wait in stages]
        single += queues
        owners[1].extend([number] * len(stages))
        owners[2].extend([number] * len(queues))
    rows = [np.stack(runs)]
    if levels:
        rows.append(1.0 - np.exp(-np.stack(levels)))
    if single:
        chances, scales, shapes = np.array(single).T[:, :, None]
        rows.append(1.0 - np.clip(chances, 1e-6, 1.0) * np.exp(-((edges / np.maximum(scales, 1e-6)) ** shapes)))
    everything = np.concatenate(rows)
    everything[:, -1] = 1.0
    spectra = np.fft.rfft(_steps(everything), 2 * bins, axis=1)
    masses = _folded(np.fft.irfft(_multiplied(spectra, owners, together), 2 * bins, axis=1), bins)
    return [Distribution(course.grid, mass) for course, mass in zip(courses, masses, strict=True)]


def _multiplied(
    spectra: npt.NDArray[np.complex128], owners: tuple[list[int], list[int], list[int]], together: dict[int, int]
) -> npt.NDArray[np.complex128]:  # fmt: skip
    """[C, F] the spectrum of each course: of its runs, times that of its waits, of which a share is all alike."""
    first = len(owners[0])
    alike = {first + at for at in together.values()}
    base: dict[int, npt.NDArray[np.complex128]] = {}
    apart: dict[int, npt.NDArray[np.complex128]] = {}
    for at, number in enumerate(itertools.chain(*owners)):
        if at not in alike:
            of = base if at < first else apart
            of[number] = spectra[at] if number not in of else of[number] * spectra[at]
    for number, at in together.items():
        apart[number] = (1.0 - COUPLED) * apart[number] + COUPLED * spectra[first + at]
    return np.stack([base[number] if number not in apart else base[number] * apart[number] for number in base])


def _lognormals(tracks: Sequence[tuple[float, Track]], bins: int) -> Floats:
    """Distribution functions [T, bins] of the summed run and link times of (step, track)."""
    mean = np.array([[max(track.mean_ms / step, 0.5)] for step, track in tracks])
    std = np.array([[max(track.std_ms / step, 0.25)] for step, track in tracks])
    sigma2 = np.log1p((std / mean) ** 2)
    z = (_log_edges(bins) + (sigma2 / 2.0 - np.log(mean))) / np.sqrt(sigma2)
    reached = normal_cdf(z)
    reached[:, -1] = 1.0
    return reached


@functools.cache
def _edges(bins: int) -> Floats:
    """Upper edges of the bins of a grid whose step is one."""
    edges = np.arange(bins, dtype=np.float64) + 0.5
    edges.setflags(write=False)
    return np.asarray(edges, dtype=np.float64)


@functools.cache
def _log_edges(bins: int) -> Floats:
    logs: Floats = np.log(_edges(bins))
    logs.setflags(write=False)
    return logs


def _steps(reached: Floats) -> Floats:
    """Masses of cumulated masses along the last axis; `np.diff` with `prepend`, without its copies."""
    mass = reached.copy()
    mass[..., 1:] -= reached[..., :-1]
    return np.asarray(mass, dtype=np.float64)


def _folded(wide: Floats, bins: int) -> Floats:
    """Rows cut to the grid, with what lies beyond it in the last bin."""
    mass = np.maximum(wide[:, :bins], 0.0)
    mass[:, -1] += np.maximum(0.0, 1.0 - mass.sum(axis=1))
    mass /= mass.sum(axis=1, keepdims=True)
    return np.asarray(mass, dtype=np.float64)
