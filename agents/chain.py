"""A chain of shards: run the first hop here, hand what is still needed to the next agent, return what the last one made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from agents.activations import pack, unpack
from agents.engine import Engine
from agents.messages import Address, ChainDone, Hop, Message, RunChain
from policies.ids import AgentId
from policies.service import ActivationFormat
from sla.errors import AgentLostError, DeadlineExceededError, InvalidInputError, ModelError

Tensors = Mapping[str, np.ndarray]
MAX_HOPS = 64


class Caller(Protocol):
    """How a chain reaches other agents."""

    async def call(
        self, agent: AgentId, address: Address, message: Message, tensors: Tensors, *, timeout_s: float
    ) -> tuple[Message, dict[str, np.ndarray]]:
        """The peer's answer. Raises AgentLostError, DeadlineExceededError, and the error that the peer answered."""
        ...


class ChainRunner:
    """Runs chains that start here, whoever asks for them."""

    def __init__(
        self, *, agent_id: AgentId, engine: Engine, peers: Caller, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._agent_id = agent_id
        self._engine = engine
        self._peers = peers
        self._clock = clock
        self._draining = False
        self.in_flight = 0

    def drain(self) -> None:
        """Take nothing new from peers, so that they fall back at once; what runs goes on."""
        self._draining = True

    async def serve(self, message: RunChain, tensors: Tensors) -> tuple[ChainDone, dict[str, np.ndarray]]:
        """A peer's request. Raises what the peer should see as a fault."""
        if self._draining:
            raise AgentLostError(f"{self._agent_id} is leaving and takes no new work.")
        if not 0 < len(message.hops) <= MAX_HOPS or message.hops[0].agent != self._agent_id:
            raise InvalidInputError(
                f"A chain that is sent to {self._agent_id} must start there and have 1 to {MAX_HOPS} hops.",
                found=message.hops[0].agent if message.hops else "no hop", accepted=self._agent_id,
            )  # fmt: skip
        self.in_flight += 1
        try:
            return await self.run(message, unpack(tensors, message.packed) if message.packed else tensors)
        finally:
            self.in_flight -= 1

    async def run(self, message: RunChain, tensors: Tensors) -> tuple[ChainDone, dict[str, np.ndarray]]:
        """The last hop's outputs and the compute time of each hop, wherever the first hop is."""
        first = message.hops[0]
        deadline_s = self._clock() + message.remaining_ms / 1000
        if first.agent != self._agent_id:
            return await self._forward(message.hops, message, tensors, deadline_s, "fp32")
        ran = await self._engine.run(
            first.sha256, tensors, first.outputs, deadline_s=deadline_s, modality=message.modality,
            holder=(message.service_id, message.epoch), stage=first.stage, blocks=first.blocks,
        )  # fmt: skip
        made = {**tensors, **ran.outputs}
        rest = message.hops[1:]
        if not rest:
            return ChainDone(run_ms=(ran.ms,)), _final(first, made)
        needed = {name for hop in rest for name in hop.inputs} | set(rest[-1].outputs)
        onward = {name: value for name, value in made.items() if name in needed}
        done, outputs = await self._forward(rest, message, onward, deadline_s, first.activations)
        return ChainDone(run_ms=(ran.ms, *done.run_ms)), outputs

    async def _forward(
        self, hops: tuple[Hop, ...], message: RunChain, tensors: Tensors, deadline_s: float, how: ActivationFormat
    ) -> tuple[ChainDone, dict[str, np.ndarray]]:
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            raise DeadlineExceededError(f"No time is left before stage {hops[0].stage} of {message.service_id}.")
        onward = RunChain(
            service_id=message.service_id, epoch=message.epoch, request_id=message.request_id,
            remaining_ms=left_s * 1000, hops=hops, modality=message.modality,
        )  # fmt: skip
        if hops[0].agent == self._agent_id:
            return await self.run(onward, tensors)
        if how != "fp32":
            tensors, packed = pack(tensors, how)
            onward = msgspec.structs.replace(onward, packed=packed)
        return await forward(self._peers, onward, tensors, timeout_s=left_s)


async def forward(
    peers: Caller, message: RunChain, tensors: Tensors, *, timeout_s: float
) -> tuple[ChainDone, dict[str, np.ndarray]]:
    """What the agent of the message's first hop answers. Raises what `Caller.call` raises."""
    first = message.hops[0]
    answer, outputs = await peers.call(first.agent, first.address, message, tensors, timeout_s=timeout_s)
    if not isinstance(answer, ChainDone):
        raise ModelError(f"{first.agent} answered a chain with {type(answer).__name__}.")
    return answer, outputs


def _final(hop: Hop, made: Tensors) -> dict[str, np.ndarray]:
    missing = [name for name in hop.outputs if name not in made]
    if missing:
        raise ModelError(f"The chain of stage {hop.stage} ended without its output {missing[0]!r}.")
    return {name: made[name] for name in hop.outputs}
