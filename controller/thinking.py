"""One decision as the loop makes it: off the event loop, from values alone."""

from __future__ import annotations

from dataclasses import dataclass

from controller.replay import Look, decided
from policies.bookings import Takes, meanwhile, takes_of
from policies.costs import CostModel
from policies.decide import Memory
from policies.decision import Decision
from policies.ids import ServiceId
from policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Thought:
    """A decision with everything that it was made from."""

    decision: Decision
    memory: Memory
    """What to remember if it is carried out, or if it is a hold."""
    snapshot: Snapshot
    look: Look
    takes: Takes
    """What the decided plan, or else the running one, takes on its agents; empty where nobody keeps books."""
    meanwhile: Takes
    """The same until a decided plan runs."""

    @property
    def found_nothing(self) -> bool:
        """Whether no plan is legal among the agents that were looked at."""
        return self.decision.plan is None and any(reason.code == "no-candidate" for reason in self.decision.reasons)


def think(snapshot: Snapshot, service: ServiceId, look: Look, *, with_takes: bool) -> Thought:
    """Decide, and say what that takes. Raises NotFoundError for an unknown service."""
    decision, memory = decided(snapshot, service, look)
    view = snapshot.services[service]
    plan = decision.plan or view.running
    if plan is None or not with_takes:
        return Thought(decision, memory, snapshot, look, {}, {})
    costs = CostModel(snapshot)
    takes = takes_of(costs, view, plan)
    return Thought(decision, memory, snapshot, look, takes, meanwhile(costs, view, plan) if decision.plan else takes)
