"""What operators want and what was decided, in memory, always written through to the store first.

One controller leads and is the only writer, so what is in memory is what is stored.
"""

from __future__ import annotations

from controller.records import PlanBook, StoredContract
from controller.state import State
from policies.decision import Decision
from policies.ids import ModelName, ServiceId
from policies.plan import Plan
from policies.service import ModelProfile, ServiceSpec
from sla.contract import Contract
from sla.errors import ConflictError, NotFoundError


class Desired:
    """Contracts, services, models and plan books. Every change is durable when its method returns."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.contracts: dict[ServiceId, StoredContract] = {}
        self.specs: dict[ServiceId, ServiceSpec] = {}
        self.models: dict[ModelName, ModelProfile] = {}
        self.books: dict[ServiceId, PlanBook] = {}
        """Keyed by the contract's service id."""

    async def load(self) -> None:
        """Read everything from the store."""
        self.contracts = await self._state.contracts()
        self.specs = await self._state.services()
        self.models = await self._state.models()
        self.books = await self._state.plan_books()

    def contract(self, service: str) -> StoredContract:
        """Raises NotFoundError."""
        stored = self.contracts.get(ServiceId(service))
        if stored is None:
            known = ", ".join(sorted(self.contracts)) or "none yet"
            raise NotFoundError(f"There is no SLA for {service!r}; there are: {known}.")
        return stored

    def spec_of(self, contract: Contract) -> ServiceSpec | None:
        """The service that a contract speaks of, None while it is not registered."""
        return self.specs.get(ServiceId(contract.service_name))

    def spec(self, service: str) -> ServiceSpec:
        """A registered service. Raises NotFoundError."""
        spec = self.specs.get(ServiceId(service))
        if spec is None:
            known = ", ".join(sorted(self.specs)) or "none yet"
            raise NotFoundError(f"There is no service {service!r}; there are: {known}.")
        return spec

    def book(self, service: str) -> PlanBook:
        """The plans of a service; an empty book if there are none."""
        return self.books.get(ServiceId(service)) or PlanBook()

    async def put_contract(self, contract: Contract, if_version: int | None) -> tuple[StoredContract, bool]:
        """The stored contract, and whether it is new. Raises ConflictError.

        Two contracts for one service would each want a plan of it, so the second is refused.
        """
        for other in self.contracts.values():
            if (
                other.contract.service_id != contract.service_id
                and other.contract.service_name == contract.service_name
            ):
                raise ConflictError(
                    f"The service {contract.service_name!r} already has the contract {other.contract.service_id!r}."
                )
        created = ServiceId(contract.service_id) not in self.contracts
        stored = await self._state.put_contract(contract, if_version)
        self.contracts[ServiceId(contract.service_id)] = stored
        return stored, created

    async def delete_contract(self, service: str, if_version: int | None) -> None:
        """Withdraw a contract and forget its plans. Raises NotFoundError or ConflictError."""
        self.contract(service)
        await self._state.delete_contract(service, if_version)
        await self._state.delete_plans(service)
        self.contracts.pop(ServiceId(service), None)
        self.books.pop(ServiceId(service), None)

    async def put_service(self, spec: ServiceSpec, models: dict[ModelName, ModelProfile]) -> None:
        """Register a service with the models of its stages."""
        for profile in models.values():
            await self._state.put_model(profile)
        await self._state.put_service(spec)
        self.models |= models
        self.specs[spec.id] = spec

    async def remove_service(self, service: ServiceId) -> None:
        """Forget a service; its models stay."""
        await self._state.delete_service(service)
        self.specs.pop(service, None)

    async def remove_model(self, name: ModelName) -> None:
        """Forget a model; no service may name it any more."""
        await self._state.delete_model(name)
        self.models = {other: profile for other, profile in self.models.items() if other != name}

    async def add_plan(self, service: str, plan: Plan, decision: Decision, at_s: float) -> None:
        """Remember a decided plan; it does not run yet."""
        await self._state.put_plan(service, plan, decision, at_s=at_s)
        await self._reload(service)

    async def set_running(self, service: str, epoch: int, *, previous_was_good: bool) -> None:
        """From now on this plan is the one to converge to."""
        before = self.book(service).running_epoch
        if previous_was_good and before is not None and before != epoch:
            await self._state.set_last_good(service, before)
        await self._state.set_running(service, epoch)
        await self._reload(service)

    async def set_pinned(self, service: str, pinned: bool) -> None:
        """Pin or unpin the running plan. Raises NotFoundError."""
        self.contract(service)
        await self._state.set_pinned(service, pinned)
        await self._reload(service)

    async def _reload(self, service: str) -> None:
        self.books[ServiceId(service)] = await self._state.plan_book(service)
