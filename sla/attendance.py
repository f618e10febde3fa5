"""Who should have been heard of: whether a quiet minute was quiet, or nobody told us.

The ingresses that carried a service's requests lately are expected to report in every minute; a minute counts as observed to the
share of that traffic whose ingresses did. Before any traffic it is enough that somebody reported.
"""

from __future__ import annotations

from sla.window import SLICE_S

REMEMBERED_S = 600.0
"""An ingress that carried nothing for this long is no longer expected."""
MAX_INGRESSES = 10_000


class Attendance:
    """The ingresses of one service. The caller's wall clock decides."""

    def __init__(self) -> None:
        self._carried: dict[str, tuple[float, int]] = {}
        """Ingress -> (when it last carried requests, how many of them lately)."""

    def carried(self, ingress: str, now_s: float, requests: int) -> None:
        """An ingress reported requests of the service."""
        at_s, before = self._carried.get(ingress, (now_s, 0))
        faded = before * 0.5 ** (max(0.0, now_s - at_s) / REMEMBERED_S)
        self._carried[ingress] = (now_s, int(faded) + requests)
        if len(self._carried) > MAX_INGRESSES:
            self._carried.pop(min(self._carried, key=lambda name: self._carried[name][0]))

    def observed(self, minute_end_s: float, heard_s: dict[str, float]) -> float:
        """Share of the service's traffic whose ingresses were heard of in the minute that ended then, [0, 1].

        `heard_s`: when each agent was last heard of.
        """
        start_s = minute_end_s - SLICE_S
        expected = {name: n for name, (at, n) in self._carried.items() if minute_end_s - at <= REMEMBERED_S + SLICE_S}
        total = sum(expected.values())
        if total == 0:
            return float(any(at_s >= start_s for at_s in heard_s.values()))
        return sum(n for name, n in expected.items() if heard_s.get(name, -1.0) >= start_s) / total
