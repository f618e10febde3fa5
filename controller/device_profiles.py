"""What models take on each type of device: asked of one idle agent per type, kept by content and type, used for all devices of the type.

A model that was just added is timed at once on the types whose agents are idle; everything else in the background, after the fleet has settled.
An agent that serves refuses, and one that begins to serve gives up, so that no request waits for more than one run of one block.
Devices at one address take turns: emulated ones share a processor, and would time each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from agents.messages import BlocksProfiled, BlockTiming, ProfileBlocks, ShardFile
from controller.clock import Clock
from controller.desired import Desired
from controller.events import EventLog
from controller.fleet import FleetRegistry, Member
from controller.models.examining import line_through
from controller.settings import ProfileSettings
from controller.state import State
from controller.telemetry import Telemetry
from policies.ids import AgentId, BlobHash, ModelName
from policies.service import BlockTime, DeviceProfile, ModelProfile
from sla.errors import AgentLostError, InvalidInputError, OverloadedError, TidegateError

log = logging.getLogger(__name__)

ITEMS = 4
"""Items of the second run of models whose items are independent."""
TRAFFIC_MS = 15_000.0
"""No emulated device is profiled in the background while requests came within this time: all of them share this machine's processor."""
MAX_MS = 1e7
Pair = tuple[ModelName, str]
"""A model and a type of device."""


class BlockFiles(Protocol):
    """Blocks of models as files; made on demand, so the call may take seconds."""

    def block_files(self, name: str) -> tuple[tuple[ShardFile, ...], BlobHash]: ...


class DeviceProfiles:
    """Owned by the event loop. What is known survives restarts."""

    def __init__(
        self, *, state: State, files: BlockFiles, fleet: FleetRegistry, desired: Desired, telemetry: Telemetry, events: EventLog,
        clock: Clock, settings: ProfileSettings, is_moving: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._state = state
        self._files = files
        self._fleet = fleet
        self._desired = desired
        self._telemetry = telemetry
        self._events = events
        self._clock = clock
        self._settings = settings
        self._is_moving = is_moving
        self._kept: dict[str, dict[str, DeviceProfile]] = {}
        """By content key, then by type."""
        self._keys: dict[ModelName, tuple[ModelProfile, str]] = {}
        self._failures: dict[Pair, tuple[int, float]] = {}
        """How often it failed, and when it may be tried again."""
        self._hosts: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._changed_ms = clock.now_ms()
        self._changes = 0
        self._known: dict[ModelName, dict[str, DeviceProfile]] = {}
        self._known_at: tuple[object, ...] = ()

    async def load(self) -> None:
        """Read what was kept."""
        for name, profile in (await self._state.device_profiles()).items():
            self._kept.setdefault(name.split(".")[0], {})[profile.device_type] = profile

    def known(self) -> dict[ModelName, dict[str, DeviceProfile]]:
        """What is known of the registered models on the types of devices that are enrolled. Not to be changed by the caller."""
        state = (self._fleet.changes, self._changes, tuple(self._desired.models.values()))
        if state != self._known_at:
            kinds = {member.facts.device_type for member in self._fleet.members.values()}
            found = {name: self.of(name) for name in self._desired.models}
            here = {name: {kind: of[kind] for kind in of.keys() & kinds} for name, of in found.items()}
            self._known, self._known_at = {name: of for name, of in here.items() if of}, state
        return self._known

    def of(self, name: ModelName) -> Mapping[str, DeviceProfile]:
        """What is known of a model, by type of device; nothing of one that is not registered."""
        return self._kept.get(self._key(name), {}) if name in self._desired.models else {}

    def changed(self) -> None:
        """An agent or a model came: wait until the fleet has settled before anything is timed in the background."""
        self._changed_ms = self._clock.now_ms()

    async def profile_now(self, service: str, names: Collection[ModelName]) -> None:
        """Time models on every type of device that is not known yet and idle. What does not work out now is done later."""
        pairs = [pair for pair in self._missing() if pair[0] in names]
        try:
            async with asyncio.timeout(self._settings.at_once_s):
                await asyncio.gather(*(self._profile(pair, service) for pair in pairs))
        except TimeoutError:
            self._events.add(
                "model", f"{service} is timed on the other types of devices in the background", service=service
            )

    async def run(self) -> None:
        """Forever: what is missing, one after the other, while nothing better is to be done."""
        while True:
            await asyncio.sleep(self._settings.look_every_s)
            try:
                # The quiet may soon be over, so there is no pause while there is something to time.
                while await self.look():
                    pass
            except TidegateError as error:
                log.warning("device profiles: %s", error)
            except Exception:
                log.exception("the device profiles stumbled")  # What is missing is asked for again at the next look.

    async def look(self) -> bool:
        """One round in the background: the first pair that can be timed now; whether there was one."""
        if self._clock.now_ms() - self._changed_ms < 1000.0 * self._settings.settle_s or self._is_moving():
            return False
        for pair in self._missing(is_background=True):
            if await self._profile(pair, pair[0]):
                return True
        return False

    def _missing(self, *, is_background: bool = False) -> list[Pair]:
        """What could be timed now: models that stages run, on types with an agent that may be asked."""
        used = {m for spec in self._desired.specs.values() for stage in spec.onnx_stages() for m in stage.variants}
        now_ms = self._clock.now_ms()
        skips_emulated = is_background and self._has_traffic(now_ms)
        kinds = {
            member.facts.device_type
            for member in self._fleet.members.values()
            if _may_be_asked(member) and not (skips_emulated and member.facts.evidence == "emulated")
        }
        pairs = [(name, kind) for name in sorted(used & self._desired.models.keys()) for kind in sorted(kinds)]
        return [
            pair
            for pair in pairs
            if pair[1] not in self.of(pair[0]) and now_ms >= self._failures.get(pair, (0, -math.inf))[1]
        ]

    def _has_traffic(self, now_ms: float) -> bool:
        return any(self._telemetry.offered_rps(service, now_ms, TRAFFIC_MS) > 0 for service in self._desired.specs)

    async def _profile(self, pair: Pair, service: str) -> bool:
        """True if it is known now. Agents of the type are asked in turn, the least busy one first."""
        name, kind = pair
        refusal: TidegateError | None = None
        for agent in self._candidates(kind):
            async with self._hosts[self._fleet.members[agent].record.seen_host]:
                if kind in self.of(name):
                    return True
                try:
                    await self._ask(agent, name, kind, service)
                    self._failures.pop(pair, None)
                    return True
                except TidegateError as error:
                    refusal = error
                    log.info("%s was not timed on %s: %s", name, agent, error)
        if refusal is not None:
            self._postpone(pair, refusal, service)
        return False

    def _candidates(self, kind: str) -> list[AgentId]:
        views = self._fleet.view().agents
        able = [a for a, m in self._fleet.members.items() if m.facts.device_type == kind and _may_be_asked(m)]
        return sorted(able, key=lambda agent: (views[agent].cpu_saturation, agent))

    async def _ask(self, agent: AgentId, name: ModelName, kind: str, service: str) -> None:
        """Time one model on one agent and keep the result. Raises TidegateError."""
        model = self._desired.models[name]
        files, sample = await asyncio.to_thread(self._files.block_files, name)
        connection = self._fleet.connection(agent)
        if connection is None:
            raise AgentLostError(f"{agent} is not connected")
        items = ITEMS if model.split_axis is not None else 1
        message = ProfileBlocks(files=files, sample_sha256=sample, items=items, budget_s=self._settings.budget_s)
        self._events.add("model", f"timing {len(files)} blocks of {name} on {kind} ({agent})", service=service)
        answer, _ = await connection.call(message, timeout_s=self._settings.timeout_s)
        if not isinstance(answer, BlocksProfiled) or not _is_sound(answer, len(model.blocks), items):
            raise InvalidInputError(f"{agent} answered with times that cannot be")
        profile = _profile_of(answer, kind, agent, items, self._clock.wall_s())
        key = self._key(name)
        await self._state.put_device_profile(f"{key}.{kind}", profile)
        self._kept.setdefault(key, {})[kind] = profile
        self._changes += 1
        self._events.add("model", _in_words(name, profile), service=service)

    def _postpone(self, pair: Pair, refusal: TidegateError, service: str) -> None:
        """Try again later: soon if the agents were busy, ever later if it went wrong."""
        count, _ = self._failures.get(pair, (0, 0.0))
        is_first = pair not in self._failures
        if isinstance(refusal, OverloadedError):
            wait_s = refusal.retry_after_s
        else:
            count, wait_s = count + 1, self._settings.retry_s * 2.0 ** min(count, 10)
            is_first = True
        self._failures[pair] = (count, self._clock.now_ms() + 1000.0 * wait_s)
        if is_first:
            name, kind = pair
            self._events.add("model", f"{name} could not be timed on {kind} now: {refusal}", service=service)

    def _key(self, name: ModelName) -> str:
        """The key of a model's content, as it is cut."""
        model = self._desired.models[name]
        held = self._keys.get(name)
        if held is None or held[0] is not model:
            held = self._keys[name] = (model, content_key(model))
        return held[1]


def content_key(model: ModelProfile) -> str:
    """32 hex digits that are the same for the same content cut at the same places."""
    cut = "\n".join(f"{block.name}:{block.file_bytes}" for block in model.blocks)
    return hashlib.sha256(f"{model.sha256}\n{cut}".encode()).hexdigest()[:32]


def _may_be_asked(member: Member) -> bool:
    return bool(member.facts.device_type) and member.state == "live" and member.connection is not None


def _is_sound(answer: BlocksProfiled, blocks: int, items: int) -> bool:
    """True if an agent's answer has the right shape and no number that cannot be."""

    def is_time(timing: BlockTiming) -> bool:
        times = (timing.one_ms,) if timing.many_ms is None else (timing.one_ms, timing.many_ms)
        return (
            all(0.0 < ms <= MAX_MS for ms in times)
            and (timing.many_ms is None) == (items == 1)
            and 0 < timing.runs <= 1_000_000
            and 0.0 <= timing.spread <= 1e6
        )

    shaped = len(answer.blocks) == blocks and len(answer.provider) <= 100 and 0 <= answer.peak_bytes <= 1 << 50
    return shaped and all(map(is_time, answer.blocks))


def _profile_of(answer: BlocksProfiled, kind: str, agent: AgentId, items: int, at_s: float) -> DeviceProfile:
    lines = [line_through(timing.one_ms, timing.many_ms, items) for timing in answer.blocks]
    whole_ms = sum(timing.one_ms for timing in answer.blocks)
    return DeviceProfile(
        device_type=kind, blocks=tuple(BlockTime(fixed_ms=fixed, per_item_ms=each) for fixed, each in lines),
        provider=answer.provider, agent=agent, measured_at_s=at_s, runs=min(timing.runs for timing in answer.blocks),
        spread=sum(timing.spread * timing.one_ms for timing in answer.blocks) / whole_ms, peak_bytes=answer.peak_bytes,
    )  # fmt: skip


def _in_words(name: ModelName, profile: DeviceProfile) -> str:
    fixed, each = sum(b.fixed_ms for b in profile.blocks), sum(b.per_item_ms for b in profile.blocks)
    return (
        f"{name} takes {fixed + each:.1f} ms for one item on {profile.device_type}, {each:.1f} ms for each further one "
        f"(at least {profile.runs} runs of each block, within {profile.spread:.0%})"
    )
