"""The promises that a contract makes, each with what it counts and which share of that must be good.

| promise | counts | bad is | share that must be good |
|---|---|---|---|
| availability | requests | not answered | `availability_sla` |
| latency-p99, and one per objective | answered requests | slower than promised | 0.99 (0.95, 0.5) |
| throughput | minutes with requests | less served than offered and promised | `availability_sla` |

A service that answers in one piece gives its first part with the whole, so `time-to-first-token` is judged by the latency;
`inter-token` has no meaning then and is not judged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sla.contract import SHARE_OF, Contract
from sla.window import Sums

Counts = Literal["requests", "answers", "minutes", "nothing"]


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """One promise of a contract."""

    name: str
    """`availability`, `throughput`, or METRIC-PERCENTILE such as `latency-p99`."""
    counts: Counts
    share: float
    """Share of what is counted that must be good; 1 - share is the error budget."""
    limit: float | None = None
    """Milliseconds, or requests per second for the throughput."""

    @property
    def allowed_share(self) -> float:
        """Share of what is counted that may be bad."""
        return 1.0 - self.share


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """How many there were, and how many of them were bad."""

    total: int
    bad: int


def promises_of(contract: Contract) -> tuple[Promise, ...]:
    """All promises that are judged from requests: availability, throughput, then times in the contract's order."""
    return (
        Promise(name="availability", counts="requests", share=contract.availability_sla),
        Promise(
            name="throughput", counts="minutes", share=contract.availability_sla, limit=contract.throughput_rps
        ),
        *(
            Promise(
                name=objective.name,
                counts="nothing" if objective.metric == "inter-token" else "answers",
                share=SHARE_OF[objective.percentile],
                limit=objective.at_most_ms,
            )
            for objective in contract.latency_objectives()
        ),
    )  # fmt: skip


def tally(promise: Promise, sums: Sums) -> Tally:
    """What a promise counts in a window."""
    match promise.counts:
        case "requests":
            return Tally(total=sums.requests, bad=sums.failed)
        case "minutes":
            return Tally(total=sums.slices, bad=sums.bad_slices)
        case "answers":
            assert promise.limit is not None
            return Tally(total=sums.latency.count, bad=sums.latency.slower_than(promise.limit))
        case "nothing":
            return Tally(total=0, bad=0)
