"""TLS as all of Tidegate uses it: version 1.3, no names of hosts; a peer is who its certificate says, if our CA signed it.

Clocks of boards are off by years, so OpenSSL's own check of dates is switched off. What a context does know is a time that has
certainly passed (`earliest_now_s`), and a certificate that ended before it is refused. The controller's comes from its clock, an
agent's is the newest date that the CA ever signed for it.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from policies.ids import AgentId
from sla.errors import RefusedError

_X509_V_FLAG_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's flag; Python has no name for it."""

ClientCertificates = Literal["none", "optional", "required"]


@dataclass(frozen=True, slots=True)
class PeerCertificate:
    """What a verified certificate says."""

    name: AgentId
    expires_s: float
    """Unix time."""


class PeerContext(ssl.SSLContext):
    """A context with a lower bound of the present."""

    earliest_now_s: Callable[[], float]
    """Unix time that has certainly passed."""


def server_context(ca_pem: str, earliest_now_s: Callable[[], float], clients: ClientCertificates) -> PeerContext:
    """For a door; clients show a certificate by this CA, or none at all where that is allowed."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, ca_pem, earliest_now_s)
    context.verify_mode = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}[clients]
    # Sessions are long and resuming them would skip a look at the certificate.
    context.num_tickets = 0
    return context


def client_context(ca_pem: str, earliest_now_s: Callable[[], float]) -> PeerContext:
    """For dialling out to a server with a certificate by this CA."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, ca_pem, earliest_now_s)


def unverified_context() -> ssl.SSLContext:
    """Encrypts, but believes anybody: only for fetching the CA certificate, whose fingerprint is then compared."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _context(protocol: int, ca_pem: str, earliest_now_s: Callable[[], float]) -> PeerContext:
    context = PeerContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | _X509_V_FLAG_NO_CHECK_TIME)
    context.load_verify_locations(cadata=ca_pem)
    context.earliest_now_s = earliest_now_s
    return context


def load_own_certificate(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Also on a context that is in use: handshakes from now on show the new certificate."""
    context.load_cert_chain(certificate, key)


def verified_peer(tls: ssl.SSLObject | None) -> PeerCertificate | None:
    """Who is at the other end; None without TLS, without a certificate, or if nothing was verified.

    Raises RefusedError if the certificate ended or has no name.
    """
    certificate = tls.getpeercert() if tls is not None else None
    if tls is None or not certificate:
        return None
    name, expires = _common_name(certificate), certificate.get("notAfter")
    if not name or not isinstance(expires, str):
        raise RefusedError("The peer's certificate names nobody.")
    expires_s = float(ssl.cert_time_to_seconds(expires))
    if isinstance(tls.context, PeerContext) and expires_s < tls.context.earliest_now_s():
        raise RefusedError(
            f"The certificate of {name} ended on {expires}; it must be renewed or the agent enrolled again."
        )
    return PeerCertificate(AgentId(name), expires_s)


def _common_name(certificate: Mapping[str, Any]) -> str | None:
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None
