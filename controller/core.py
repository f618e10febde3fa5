"""The controller: every operation that the API offers, over the parts that do the work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib import metadata

from agents.connection import Connection
from agents.messages import Hello, Leave, Report, Route, ShapeLink, ThrottleDevice
from controller.api_keys import ApiKeys
from controller.clock import Clock, SystemClock
from controller.cloud import Cloud, JoinOffer
from controller.contracts import Contracts
from controller.desired import Desired
from controller.device_profiles import DeviceProfiles
from controller.door import AgentDoor
from controller.embedded_store import EmbeddedStore
from controller.events import EventLog
from controller.fleet import FleetRegistry, Member
from controller.gateway import Gateway
from controller.knobs import Knobs
from controller.leadership import Leadership
from controller.llm_service import LlmService
from controller.loop import ControlLoop
from controller.model_service import ModelService
from controller.models.registry import ModelRegistry
from controller.operator_plans import OperatorPlans
from controller.part_runners import PartRunner
from controller.pki import CertificateAuthority
from controller.present import (
    agent_out,
    decision_out,
    event_out,
    model_out,
    plan_out,
    service_out,
)
from controller.replay import DecisionLog, Logged, log_bytes
from controller.rollout import Rollout
from controller.settings import ControllerSettings
from controller.sla_reports import month_of
from controller.sla_views import SlaReport, SlaStatusOut
from controller.slis import Slis
from controller.state import State
from controller.store import Store, open_store
from controller.telemetry import Telemetry
from controller.variant_service import VariantService
from controller.views import (
    Admission,
    AgentOut,
    Applied,
    DecisionOut,
    EventOut,
    KnobOut,
    LinkShapeIn,
    ModelOut,
    PlanOut,
    ServiceOut,
    SlaOut,
    StatusOut,
    TokenIn,
    TokenOut,
)
from policies.fleet import LinkView
from policies.ids import AgentId, ServiceId
from policies.plan import cover_faults
from sla.contract import parse_contract
from sla.errors import ConflictError, InvalidInputError, NotFoundError, TidegateError

log = logging.getLogger(__name__)


class Controller:
    """One controller. `start` before use; every method may be called from the event loop only."""

    def __init__(self, settings: ControllerSettings, clock: Clock | None = None) -> None:
        self.settings = settings
        self.version = metadata.version("tidegate")
        self.clock = clock or SystemClock()
        self.ca = CertificateAuthority(settings.directory / "ca")
        self.registry = ModelRegistry(settings.directory / "models")
        self.events = EventLog(self.clock)
        self.telemetry = Telemetry()
        self.fleet = FleetRegistry(
            self.telemetry, self.clock, self.events, settings.suspicion, self.registry.file_keys
        )  # fmt: skip
        self.cloud = Cloud(settings.cloud)
        self.gateway = Gateway(self.ca, self.registry, settings.directory / "gateway")
        self.rollout = Rollout(
            self.fleet, self.registry, self.gateway, settings.loop, lambda spec, plan: self.knobs.values(spec, plan)
        )  # fmt: skip
        self._embedded: EmbeddedStore | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._opened = AsyncExitStack()
        """Closes what was opened, newest first, also when the start stops half-way."""
        self._started = False

    # --- life

    async def start(self) -> None:
        """Open the store, restore what was acknowledged, open the agents' door, start the loop and the cloud.

        Raises TidegateError; then nothing is left open.
        """
        try:
            await self._start()
        except BaseException:
            await self._opened.aclose()
            raise

    async def _start(self) -> None:
        store = await self._open_store()
        self._opened.push_async_callback(store.close)
        self.state = State(store)
        self.leadership = Leadership(self.state, self.settings.directory)
        await self.leadership.take()
        self._opened.push_async_callback(self.leadership.give_up)
        self.api_keys = ApiKeys(self.state)
        await self.api_keys.load()
        self.desired = Desired(self.state)
        await self.desired.load()
        self.fleet.restore(await self.state.agents())
        self.knobs = Knobs(
            desired=self.desired, state=self.state, fleet=self.fleet, telemetry=self.telemetry, events=self.events,
            clock=self.clock, tell_own_ingress=self.gateway.tune, look_every_ms=self.settings.loop.look_every_ms,
            wishes=lambda contract: self.llm.intents.in_force(contract),
        )  # fmt: skip
        await self.knobs.load()
        self.slis = Slis(self.state, self.clock)
        await self.slis.restore(list(self.desired.specs))
        self.llm = LlmService(self.settings.llm, self.state, self.events, self.clock)
        self._opened.push_async_callback(self.llm.close)
        await self.llm.start()
        self.profiles = DeviceProfiles(
            state=self.state, files=self.registry, fleet=self.fleet, desired=self.desired, telemetry=self.telemetry,
            events=self.events, clock=self.clock, settings=self.settings.profiles, is_moving=lambda: self.loop.is_anything_moving(),
        )  # fmt: skip
        await self.profiles.load()
        self.loop = ControlLoop(
            desired=self.desired, fleet=self.fleet, telemetry=self.telemetry, slis=self.slis, rollout=self.rollout,
            state=self.state, advisor=self.llm.advisor, events=self.events, clock=self.clock, settings=self.settings.loop,
            on_route=self._on_route, wishes=self.llm.intents.in_force, advised=self.llm.intents.advised,
            run_parts=PartRunner(self.cloud), device_profiles=self.profiles.known,
        )  # fmt: skip
        self.llm.bind(self.loop)
        self.operator_plans = OperatorPlans(desired=self.desired, loop=self.loop)
        self._opened.push_async_callback(self.loop.close)
        self.contracts = Contracts(
            desired=self.desired, loop=self.loop, slis=self.slis, telemetry=self.telemetry, state=self.state,
            events=self.events, clock=self.clock,
        )  # fmt: skip
        self.model_service = ModelService(
            registry=self.registry, directory=self.settings.directory / "models", cache=self.settings.cache, desired=self.desired,
            loop=self.loop, events=self.events, profiles=self.profiles,
        )  # fmt: skip
        self.variant_service = VariantService(self.model_service)
        self.door = AgentDoor(
            state=self.state, ca=self.ca, blobs=self.registry, fleet=self.fleet, telemetry=self.telemetry, clock=self.clock,
            events=self.events, on_hello=self._on_hello, on_report=self._on_report,
        )  # fmt: skip
        await self.door.open(self.settings.door.host, self.settings.door.agent_port)
        self._opened.push_async_callback(self.door.close)
        await self.gateway.start()
        self._opened.push_async_callback(self.gateway.stop)
        self._opened.push_async_callback(self.cloud.stop)
        self._tasks = [
            asyncio.create_task(self.loop.run(), name="loop"),
            asyncio.create_task(self.profiles.run(), name="profiles"),
            asyncio.create_task(self.knobs.run(), name="knobs"),
            asyncio.create_task(self._save_windows(), name="save-windows"),
            asyncio.create_task(self.leadership.keep(), name="leadership"),
            asyncio.create_task(self._start_cloud(), name="cloud"),
        ]
        self._started = True
        log.info("controller %s ready; CA fingerprint %s", self.version, self.ca.fingerprint)

    async def stop(self) -> None:
        """Save, close the doors, stop what was started here. Agents go on serving."""
        self._started = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.slis.save()
        finally:
            await self._opened.aclose()

    async def ready(self) -> bool:
        """The store answers and the agents' door is open."""
        return self._started and await self.state.store.ready()

    async def _open_store(self) -> Store:
        if self.settings.store_url is not None:
            return await open_store(self.settings.store_url)
        self._embedded = EmbeddedStore(self.settings.directory / "store")
        self._opened.push_async_callback(self._embedded.stop)
        await self._embedded.start()
        return await self._embedded.open()

    async def _start_cloud(self) -> None:
        if self.settings.cloud.ray == "none":
            return
        # A local actor keeps its identity in its directory; on a cluster Ray may restart it on a machine that has none.
        uses = 1 if self.settings.cloud.ray == "local" else 100
        now_s = self.clock.wall_s()
        offers = [
            JoinOffer(
                controller=self.door_url,
                token=await self.state.create_token(
                    ttl_s=86_400.0, uses=uses, now_s=now_s, note=f"cloud agent {number}"
                ),
                ca_fingerprint=self.ca.fingerprint,
                directory=self.settings.directory / f"cloud-{number}",
            )
            for number in range(1, self.settings.cloud.agents + 1)
        ]
        await self.cloud.start(offers)
        self.events.add("cloud", f"Cloud: {self.cloud.state}.")

    async def _save_windows(self) -> None:
        while True:
            await asyncio.sleep(self.settings.loop.save_windows_every_s)
            try:
                self.slis.fold(self.gateway.take_services())
                self.contracts.tick()
                await self.slis.save()
            except TidegateError as error:
                log.warning("SLI counters could not be saved: %s", error)
            except Exception:
                log.exception("the SLI counters stumbled")  # The next round may do better; counting must not end.

    def _on_hello(self, agent: AgentId, hello: Hello) -> None:
        self.profiles.changed()
        self.loop.said_hello(agent, hello)

    def _on_report(self, agent: AgentId, report: Report) -> None:
        self.slis.fold(report.services, agent)

    def _on_route(self, route: Route) -> None:
        self.gateway.serve(route)

    # --- contracts

    async def apply_contract(self, document: bytes, if_version: int | None) -> Applied:
        """Store a contract (durable when this returns) and say whether it can be kept. Raises ContractError, ConflictError."""
        contract = parse_contract(document)
        admission = await self.contracts.admission(contract)
        stored, created = await self.desired.put_contract(contract, if_version)
        self.events.add(
            "contract",
            f"Contract {contract.service_id} version {stored.version}: {admission.text}",
            service=contract.service_id,
        )
        self.loop.poke("contract", ServiceId(contract.service_id))
        return Applied(service_id=contract.service_id, version=stored.version, created=created, admission=admission)

    async def preview(self, document: bytes) -> Admission:
        """Whether a contract could be kept now; changes nothing. Raises ContractError."""
        return await self.contracts.admission(parse_contract(document))

    async def delete_contract(self, service: str, if_version: int | None) -> None:
        """Withdraw a contract. Raises NotFoundError, ConflictError."""
        contract = self.desired.contract(service).contract
        await self.desired.delete_contract(service, if_version)
        self.gateway.drop(ServiceId(contract.service_name))
        await self.loop.retire(ServiceId(service), ServiceId(contract.service_name))
        self.events.add("contract", f"Contract {service} is withdrawn.", service=service)

    def slas(self) -> list[SlaOut]:
        """All contracts with what was attained."""
        return [self.sla(service) for service in sorted(self.desired.contracts)]

    def sla(self, service: str) -> SlaOut:
        """One contract with what was attained. Raises NotFoundError."""
        return self.contracts.sla(service)

    def sla_status(self, service: str) -> SlaStatusOut:
        """One contract with its budgets, burn rates, alerts and risk. Raises NotFoundError."""
        return self.contracts.status(service)

    async def sla_report(self, service: str, month: str | None) -> SlaReport:
        """One month of a contract (UTC; by default the running one). Raises NotFoundError, InvalidInputError."""
        return await self.contracts.report(service, month or month_of(self.clock.wall_s()))

    # --- agents

    @property
    def door_url(self) -> str:
        """What agents dial."""
        host = self.settings.door.advertise or self.settings.door.host
        return f"tidegate://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self.door.port}"

    async def create_token(self, wanted: TokenIn) -> TokenOut:
        """A join token, shown once. Raises InvalidInputError."""
        now_s = self.clock.wall_s()
        secret = await self.state.create_token(ttl_s=wanted.ttl_s, uses=wanted.uses, now_s=now_s, note=wanted.note)
        command = f"tidegate agent join {self.door_url} --token {secret} --ca-fingerprint {self.ca.fingerprint}"
        return TokenOut(
            token=secret, ca_fingerprint=self.ca.fingerprint, controller=self.door_url, command=command,
            expires_at_s=now_s + wanted.ttl_s, uses=wanted.uses,
        )  # fmt: skip

    def agents(self) -> list[AgentOut]:
        """All enrolled agents."""
        fleet = self.fleet.view()
        links: dict[AgentId, list[LinkView]] = {}
        for link in fleet.links.values():
            links.setdefault(link.src, []).append(link)
        return [
            agent_out(
                self.fleet.members[agent], view, self.telemetry, sorted(links.get(agent, []), key=lambda k: k.dst)
            )
            for agent, view in sorted(fleet.agents.items())
        ]

    async def drain(self, agent: str) -> None:
        """Move the agent's shards elsewhere. Raises NotFoundError."""
        self._member(agent)
        self.fleet.drain(AgentId(agent))
        self.loop.poke_around("operator", AgentId(agent))

    async def undrain(self, agent: str) -> None:
        """Let a drained agent have work again. Raises NotFoundError."""
        self._member(agent)
        self.fleet.undrain(AgentId(agent))
        self.loop.poke_around("agent-joined", AgentId(agent))

    async def revoke(self, agent: str) -> None:
        """Take the agent's identity away. Raises NotFoundError."""
        member = self._member(agent)
        await self.state.revoke_agent(agent)
        if member.connection is not None:
            await member.connection.close()
        self.fleet.remove(AgentId(agent))
        self.telemetry.forget(AgentId(agent))
        self.loop.poke_around("agent-lost", AgentId(agent))

    async def shape_link(self, wanted: LinkShapeIn) -> None:
        """Slow an emulated link. Raises NotFoundError, InvalidInputError (not emulated), AgentLostError."""
        connection = self._emulated(wanted.src)
        if wanted.dst is not None:
            self._member(wanted.dst)
        message = ShapeLink(
            peer=AgentId(wanted.dst) if wanted.dst else None,
            delay_ms=wanted.delay_ms,
            jitter_ms=wanted.jitter_ms,
            bandwidth_bytes_per_s=wanted.bandwidth_mbps * 1e6 / 8 if wanted.bandwidth_mbps else None,
        )
        await connection.call(message, timeout_s=5.0)
        self.events.add(
            "link",
            f"Link {wanted.src} to {wanted.dst or 'all'} shaped: {wanted.delay_ms:g} ms, jitter {wanted.jitter_ms:g} ms, {wanted.bandwidth_mbps or 'unlimited'} Mbit/s.",
            agent=wanted.src,
        )

    async def throttle(self, agent: str, factor: float) -> None:
        """Make an emulated device so many times slower. Raises NotFoundError, InvalidInputError (not emulated), AgentLostError."""
        await self._emulated(agent).call(ThrottleDevice(factor=factor), timeout_s=5.0)
        self.events.add("agent-throttled", f"{agent} is throttled: runs take {factor:g} times as long.", agent=agent)

    def _emulated(self, agent: str) -> Connection:
        """The connection of an agent that may be given trouble."""
        member = self._member(agent)
        if member.facts.evidence != "emulated":
            raise InvalidInputError(
                f"{agent} is not emulated; only emulated devices and their links can be slowed down."
            )
        if member.connection is None:
            raise NotFoundError(f"{agent} is not connected.")
        return member.connection

    async def dismiss(self, agent: str) -> None:
        """Ask a drained agent to finish and exit. Raises NotFoundError, AgentLostError."""
        member = self._member(agent)
        if member.connection is not None:
            await member.connection.call(Leave(), timeout_s=5.0)

    def _member(self, agent: str) -> Member:
        member = self.fleet.members.get(AgentId(agent))
        if member is None:
            raise NotFoundError(
                f"There is no agent {agent!r}; known are: {', '.join(sorted(self.fleet.members)) or 'none yet'}."
            )
        return member

    # --- models and services

    def models(self) -> list[ModelOut]:
        """All registered models."""
        return [model_out(profile, self.profiles.of(name)) for name, profile in sorted(self.desired.models.items())]

    def service_list(self) -> list[ServiceOut]:
        """All registered services."""
        return [service_out(spec, self.knobs.out(spec)) for _, spec in sorted(self.desired.specs.items())]

    def service_knobs(self, service: str) -> list[KnobOut]:
        """Where a service's knobs stand. Raises NotFoundError."""
        return self.knobs.out(self.desired.spec(service))

    async def tune(self, service: str, wanted: Mapping[str, float | str]) -> list[KnobOut]:
        """Turn knobs of a service while it runs; see `Knobs.tune`. Raises NotFoundError, InvalidInputError."""
        await self.knobs.tune(service, wanted)
        return self.service_knobs(service)

    # --- plans and decisions

    async def plans(self, service: str | None, limit: int) -> list[PlanOut]:
        """Plans that were decided, newest last."""
        found = []
        for contract_id, book in self.desired.books.items():
            if service is not None and contract_id != service:
                continue
            for record in book.history:
                plan = record.plan
                sketch = self.telemetry.epoch_sketch(plan.service_id, plan.epoch)
                found.append(
                    plan_out(
                        record,
                        running=plan.epoch == book.running_epoch,
                        active_at_s=self.loop.active_at_s(contract_id, plan.epoch),
                        measured_p99_ms=sketch.quantile(0.99) if sketch is not None and sketch.count else None,
                        requests=sketch.count if sketch is not None else 0,
                        models=self.desired.models,
                    )
                )
        return sorted(found, key=lambda plan: plan.decided_at_s)[-limit:]

    async def decisions(self, service: str | None, limit: int) -> list[DecisionOut]:
        """Decisions with their reasons, newest last."""
        return [decision_out(record) for record in await self.state.tail_decisions(limit, service)]

    async def decision_log(self, service: str, limit: int) -> bytes:
        """The newest decisions of a service, the LLM's among them, with all that they were made from, for `tidegate replay`."""
        records = await self.state.tail_decisions(limit, service)
        entries = [Logged(record=r, seen=await self.state.snapshot_of(service, r.id)) for r in records]
        log = DecisionLog(entries=tuple(entries), exchanges=await self.llm.logged(service, limit))
        return await asyncio.to_thread(log_bytes, log)

    async def rollback(self, service: str) -> int:
        """Run the last good plan again and pin it; its new epoch. Raises NotFoundError, RolloutError."""
        self.desired.contract(service)
        last_good = self.desired.book(service).last_good
        if last_good is None:
            raise ConflictError(f"{service} has no earlier plan that ran well.")
        spec = self.desired.spec_of(self.desired.contract(service).contract)
        if spec is not None and (faults := cover_faults(last_good, spec, self.desired.models)):
            raise ConflictError(f"Plan {last_good.epoch} of {service} cannot run any more: {faults[0]}.")
        was_pinned = self.desired.book(service).pinned
        await self.desired.set_pinned(service, True)  # First, so that the loop leaves it alone.
        try:
            return await self.loop.restore(ServiceId(service), last_good)
        except TidegateError:
            await self.desired.set_pinned(service, was_pinned)
            raise

    async def pin(self, service: str, pinned: bool) -> None:
        """Pin or unpin the running plan. Raises NotFoundError."""
        await self.desired.set_pinned(service, pinned)
        self.loop.poke("operator", ServiceId(service))

    # --- itself

    async def status(self) -> StatusOut:
        """How the controller itself is."""
        return StatusOut(
            version=self.version,
            ready=await self.ready(),
            leader=self.leadership.leads,
            policy=self.llm.advisor.policy(),
            cloud=self.cloud.state,
            store="embedded Valkey" if self._embedded else "external",
            agents_live=sum(member.state == "live" for member in self.fleet.members.values()),
            services=len(self.desired.specs),
        )

    def recent_events(self, limit: int) -> list[EventOut]:
        """What happened, newest last."""
        return [event_out(event) for event in self.events.tail(limit)]
