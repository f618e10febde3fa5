"""Joining a cluster: a join token and the CA's fingerprint become a certificate for the key of this device."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from agents import tls
from agents.identity import CONTROLLER_ID, Identity
from agents.keys import certificate_fingerprint, parse_certificate
from agents.messages import Ca, DeviceFacts, Enroll, Enrolled, GetCa, Renew
from agents.wire import Connection, connect
from policies.ids import AgentId
from sla.errors import InvalidInputError, RefusedError, RetryableError

DEFAULT_PORT: Final = 7443
_ATTEMPTS: Final = 6
_FIRST_PAUSE_S: Final = 0.25
_CALL_TIMEOUT_S: Final = 10.0

Sleep = Callable[[float], Awaitable[object]]


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of `tidegate://host:port`, `https://host:port` or `host:port`; the port may be left out (7443).

    Raises InvalidInputError.
    """
    accepted = "tidegate://HOST[:PORT], https://HOST[:PORT] or HOST[:PORT]"
    found = _split_url(url.strip())
    if found is None:
        raise InvalidInputError(
            f"{url[:120]!r} is not the address of a controller; write {accepted}.", found=url[:120], accepted=accepted
        )
    return found


def _split_url(text: str) -> tuple[str, int] | None:
    if re.search(r"\s", text):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"tidegate://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment or parts.username
    if not host or parts.scheme not in ("tidegate", "https") or has_more or port == 0:
        return None
    return host, port or DEFAULT_PORT


def parse_fingerprint(text: str) -> str:
    """64 hex digits, lower case; colons and a leading `sha256:` are allowed. Raises InvalidInputError."""
    digits = text.strip().lower().removeprefix("sha256:").replace(":", "")
    if not re.fullmatch(r"[0-9a-f]{64}", digits):
        raise InvalidInputError(
            "The CA fingerprint must be 64 hex digits, as `tidegate token create` prints it.",
            found=text[:80],
            accepted="64 hex digits",
        )
    return digits


async def enroll(
    host: str,
    port: int,
    token: str,
    ca_fingerprint: str,
    identity: Identity,
    facts: DeviceFacts,
    *,
    sleep: Sleep = asyncio.sleep,
) -> AgentId:
    """The id that the controller gives this device; the certificate is saved in `identity`.

    A link that drops is tried again, with the same key: the controller does not spend the token twice. Raises RefusedError if the
    CA is not the expected one or the token is not accepted, and the last RetryableError if it does not work out.
    """
    fingerprint = parse_fingerprint(ca_fingerprint)
    for attempt in range(_ATTEMPTS):
        try:
            return await _enroll_once(host, port, token, fingerprint, identity, facts)
        except RetryableError:
            if attempt == _ATTEMPTS - 1:
                raise
        await sleep(_FIRST_PAUSE_S * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


async def _enroll_once(
    host: str, port: int, token: str, fingerprint: str, identity: Identity, facts: DeviceFacts
) -> AgentId:
    ca_pem = await _fetch_ca(host, port, fingerprint)
    # Nothing secret is sent before this context has verified the controller.
    context = tls.client_context(ca_pem, earliest_now_s=lambda: 0.0)
    connection = await connect(host, port, context, expect_peer=CONTROLLER_ID)
    try:
        answer, _ = await connection.call(
            Enroll(token=token, csr_pem=identity.csr_pem(), facts=facts), timeout_s=_CALL_TIMEOUT_S
        )
    finally:
        await connection.close()
    if not isinstance(answer, Enrolled):
        raise InvalidInputError(f"The controller answered an enrollment with {type(answer).__name__}.")
    return _keep(answer, ca_pem, identity)


async def _fetch_ca(host: str, port: int, fingerprint: str) -> str:
    connection = await connect(host, port, tls.unverified_context())
    try:
        answer, _ = await connection.call(GetCa(), timeout_s=_CALL_TIMEOUT_S)
    finally:
        await connection.close()
    if not isinstance(answer, Ca):
        raise InvalidInputError(f"The controller answered the question for its CA with {type(answer).__name__}.")
    found = certificate_fingerprint(parse_certificate(answer.ca_pem))
    if not hmac.compare_digest(found, fingerprint):
        raise RefusedError(
            f"The CA of {host}:{port} has fingerprint {found[:16]}..., not {fingerprint[:16]}...: "
            "this is another cluster, or somebody is in between."
        )
    return answer.ca_pem


async def renew(connection: Connection, identity: Identity) -> None:
    """Replace the certificate, over the mutual TLS connection with the controller; contexts that are in use follow."""
    answer, _ = await connection.call(Renew(csr_pem=identity.csr_pem()), timeout_s=_CALL_TIMEOUT_S)
    if not isinstance(answer, Enrolled):
        raise InvalidInputError(f"The controller answered a renewal with {type(answer).__name__}.")
    if answer.agent_id != identity.agent_id:
        raise RefusedError(f"The controller renewed {answer.agent_id} instead of {identity.agent_id}.")
    if certificate_fingerprint(parse_certificate(answer.ca_pem)) != identity.ca_fingerprint:
        raise RefusedError("The controller's CA is another one than at enrollment; enroll again with a new join token.")
    _keep(answer, answer.ca_pem, identity)


def _keep(answer: Enrolled, ca_pem: str, identity: Identity) -> AgentId:
    identity.save_certificate(answer.certificate_pem, ca_pem)
    if identity.agent_id is None or identity.agent_id != answer.agent_id:
        raise RefusedError("The certificate that came back bears another name than the answer.")
    return identity.agent_id
