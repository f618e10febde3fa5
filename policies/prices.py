"""What a plan's requests cost: electricity at the edge, rented time in the cloud. Estimates until an operator gives prices."""

from __future__ import annotations

import msgspec

from policies.plan import Plan
from policies.predict import Predictor

J_PER_KWH = 3.6e6


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """In whatever currency the contracts are written in."""

    per_kwh: float = 0.30
    """Electricity of edge devices (estimate: a household price)."""
    per_cloud_busy_hour: float = 0.20
    """One busy cloud core for an hour (estimate: a few list prices of small machines)."""


def cost_per_1k(p: Predictor, plan: Plan, prices: Prices | None = None) -> float:
    """What 1,000 requests of the planned service cost."""
    known = prices or Prices()
    each = 0.0
    for stage, agent, model, span, items in p.costs.runs(p.view, plan):
        run_ms = p.costs.run_ms(stage, model, agent, span, items)
        device = p.costs.agents[agent]
        if device.is_cloud:
            each += run_ms / 3.6e6 * known.per_cloud_busy_hour
        else:
            each += run_ms / 1000.0 * device.power_w / J_PER_KWH * known.per_kwh
    return 1000.0 * each
