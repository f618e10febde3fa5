"""Enrollment against a small real door: wire.serve and a CertificateAuthority over loopback sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from agents.enroll import enroll, parse_fingerprint, parse_url, renew
from agents.identity import CONTROLLER_ID, Identity
from agents.messages import Ca, DeviceFacts, Done, Enroll, Enrolled, GetCa, Message, Probe, Renew
from agents.wire import Connection, Tensors, WireServer, connect, serve
from controller.pki import CertificateAuthority, public_key_fingerprint
from policies.ids import AgentId
from sla.errors import AgentLostError, InvalidInputError, RefusedError

NOW_S = 1_790_000_000.0
FACTS = DeviceFacts(platform="rk3588", evidence="emulated", hostname="board")


@dataclass
class Door:
    """The controller's part of enrollment, with tokens that are good for one key."""

    ca: CertificateAuthority
    tokens: dict[str, str | None]
    drops: int = 0
    """Answers to Enroll that are lost on the way, after the token was spent."""
    now_s: float = NOW_S
    agents: dict[str, AgentId] = field(default_factory=dict)
    ca_pem: str | None = None
    """What GetCa answers, if not the truth."""

    async def handle(
        self, connection: Connection, message: Message, tensors: dict[str, np.ndarray]
    ) -> tuple[Message, Tensors] | None:
        match message:
            case GetCa():
                return Ca(ca_pem=self.ca_pem or self.ca.ca_pem), {}
            case Enroll():
                answer = self._enroll(message)
                if self.drops:
                    self.drops -= 1
                    connection.abort()
                return answer, {}
            case Renew() if connection.peer_id is not None:
                return self._certify(message.csr_pem, connection.peer_id), {}
        return Done(), {}

    def _enroll(self, message: Enroll) -> Enrolled:
        key = public_key_fingerprint(message.csr_pem)
        if self.tokens.get(message.token, "unknown") not in (None, key):
            raise RefusedError("The join token is used up or unknown; make a new one with `tidegate token create`.")
        self.tokens[message.token] = key
        agent = self.agents.setdefault(key, AgentId(f"{message.facts.hostname}-{len(self.agents)}"))
        return self._certify(message.csr_pem, agent)

    def _certify(self, csr_pem: str, agent: AgentId) -> Enrolled:
        certificate = self.ca.sign_agent(csr_pem, agent, now_s=self.now_s)
        return Enrolled(agent_id=agent, certificate_pem=certificate, ca_pem=self.ca.ca_pem)


class Pauses:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(CertificateAuthority(tmp_path / "ca", clock=lambda: NOW_S), {"good": None})


@pytest.fixture
async def server(door: Door) -> AsyncIterator[WireServer]:
    async with await serve(door.handle, "127.0.0.1", 0, door.ca.server_context("optional")) as server:
        yield server


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return Identity(tmp_path / "device")


async def test_a_token_becomes_a_certificate_that_opens_the_door(
    door: Door, server: WireServer, identity: Identity
) -> None:
    agent = await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, identity, FACTS)
    assert agent == "board-0" == identity.agent_id
    connection = await connect("127.0.0.1", server.port, identity.client_context(), expect_peer=CONTROLLER_ID)
    assert connection.peer_id == CONTROLLER_ID
    assert [peer.peer_id for peer in server.connections if peer.peer_id] == ["board-0"]
    await connection.close()


async def test_a_dropped_link_does_not_burn_the_token(door: Door, server: WireServer, identity: Identity) -> None:
    door.drops = 2
    pauses = Pauses()
    agent = await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, identity, FACTS, sleep=pauses)
    assert agent == "board-0"
    assert pauses.seconds == [0.25, 0.5]


async def test_a_crash_in_the_middle_is_finished_by_the_same_key(
    door: Door, server: WireServer, tmp_path: Path
) -> None:
    door.drops = 6
    with pytest.raises(AgentLostError):
        await enroll(
            "127.0.0.1", server.port, "good", door.ca.fingerprint, Identity(tmp_path / "a"), FACTS, sleep=Pauses()
        )
    restarted = Identity(tmp_path / "a")
    assert await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, restarted, FACTS) == "board-0"


async def test_a_used_token_is_refused_for_another_device(door: Door, server: WireServer, tmp_path: Path) -> None:
    await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, Identity(tmp_path / "a"), FACTS)
    second = Identity(tmp_path / "b")
    with pytest.raises(RefusedError, match="used up"):
        await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, second, FACTS)
    assert second.agent_id is None


async def test_another_ca_is_refused_before_the_token_is_sent(
    door: Door, server: WireServer, identity: Identity
) -> None:
    with pytest.raises(RefusedError, match="another cluster"):
        await enroll("127.0.0.1", server.port, "good", "0" * 64, identity, FACTS)
    assert door.tokens == {"good": None}


async def test_a_relayed_ca_certificate_does_not_help_an_impostor(
    door: Door, server: WireServer, identity: Identity, tmp_path: Path
) -> None:
    true_ca = CertificateAuthority(tmp_path / "true-ca")
    door.ca_pem = true_ca.ca_pem
    with pytest.raises(RefusedError, match="not accepted"):
        await enroll("127.0.0.1", server.port, "good", true_ca.fingerprint, identity, FACTS)
    assert door.tokens == {"good": None}


async def test_an_enrolled_agent_cannot_play_the_controller(door: Door, identity: Identity, tmp_path: Path) -> None:
    identity.save_certificate(door.ca.sign_agent(identity.csr_pem(), AgentId("evil"), now_s=NOW_S), door.ca.ca_pem)
    async with await serve(door.handle, "127.0.0.1", 0, identity.server_context("none")) as server:
        with pytest.raises(RefusedError, match="is evil, not controller"):
            await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, Identity(tmp_path / "new"), FACTS)


async def test_nobody_there_is_one_sentence_after_some_attempts(identity: Identity) -> None:
    pauses = Pauses()
    with pytest.raises(AgentLostError, match=r"127\.0\.0\.1:1 cannot be reached"):
        await enroll("127.0.0.1", 1, "good", "a" * 64, identity, FACTS, sleep=pauses)
    assert pauses.seconds == [0.25, 0.5, 1.0, 2.0, 4.0]


async def test_renewal_replaces_the_certificate_in_contexts_that_are_in_use(
    door: Door, server: WireServer, identity: Identity
) -> None:
    await enroll("127.0.0.1", server.port, "good", door.ca.fingerprint, identity, FACTS)
    context = identity.client_context()
    before_s = identity.certificate_expires_s
    door.now_s += 50_000
    connection = await connect("127.0.0.1", server.port, context)
    await renew(connection, identity)
    assert before_s is not None
    assert identity.certificate_expires_s == before_s + 50_000
    again = await connect("127.0.0.1", server.port, context)
    await again.call(Probe(), timeout_s=5)
    assert identity.certificate_expires_s in {peer.peer_expires_s for peer in server.connections}
    await again.close()
    await connection.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tidegate://edge.example:7000", ("edge.example", 7000)),
        ("https://edge.example:7000/", ("edge.example", 7000)),
        ("10.0.0.7:81", ("10.0.0.7", 81)),
        ("10.0.0.7", ("10.0.0.7", 7443)),
        ("[fe80::1]:9", ("fe80::1", 9)),
    ],
)
def test_urls(url: str, expected: tuple[str, int]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    ["", "http://a:1", "a:99999", "a:0", "a:b", "tidegate://", "https://a/path", "tidegate://u@a", "a b:1", "[x:1"],
)
def test_urls_that_are_none_are_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"is not the address of a controller; write tidegate://"):
        parse_url(url)


def test_fingerprints() -> None:
    digits = "ab" * 32
    assert parse_fingerprint("SHA256:" + ":".join(["AB"] * 32)) == digits
    with pytest.raises(InvalidInputError, match="64 hex digits"):
        parse_fingerprint("ab" * 31)
