"""The certificate authority: one key in the controller's directory, which says who is who in this cluster."""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agents.identity import CONTROLLER_ID, Identity
from agents.keys import (
    BACKDATE_S,
    certificate_fingerprint,
    key_fingerprint,
    load_or_create_key,
    parse_certificate,
    parse_request,
    write_atomically,
)
from agents.tls import ClientCertificates, PeerContext
from policies.ids import AgentId
from sla.errors import InvalidInputError, SettingsError

AGENT_LIFETIME_S: Final = 86_400.0
CONTROLLER_LIFETIME_S: Final = 90 * 86_400.0
CA_LIFETIME_S: Final = 20 * 365 * 86_400.0
GRACE_S: Final = 30 * 86_400.0
"""An agent that was switched off may come back this long after its certificate ended, and renew it; whether it is still wanted
is for the door to say, from its records."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class CertificateAuthority:
    """The CA kept in `directory`, created if there is none. Several processes may open the same one."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds. Raises SettingsError if what lies there is damaged."""
        self.directory = directory
        self._clock = clock
        self._identities: dict[AgentId, Identity] = {}
        self._key = load_or_create_key(directory / "ca-key.pem")
        self._certificate = self._load_or_create(directory / "ca.pem")

    @property
    def ca_pem(self) -> str:
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        """sha256 of the CA certificate's DER form, hex: what goes with a join token."""
        return certificate_fingerprint(self._certificate)

    def sign_agent(self, csr_pem: str, agent_id: AgentId, *, now_s: float, lifetime_s: float = AGENT_LIFETIME_S) -> str:
        """A certificate (PEM) that lets the key of `csr_pem` act as `agent_id`, as a client and as a server.

        It begins a day before `now_s` (Unix). Raises InvalidInputError for a damaged request or a name that cannot be one.
        """
        if agent_id == CONTROLLER_ID:
            raise InvalidInputError(f"An agent cannot be named {CONTROLLER_ID!r}.")
        # Agents come for renewal all the time, so this keeps our own certificates fresh for as long as the process lives.
        for own_name in tuple(self._identities):
            self.identity_for(own_name)
        return self._sign(csr_pem, agent_id, now_s, lifetime_s)

    def server_context(self, client_certs: ClientCertificates = "optional") -> PeerContext:
        """For the agents' door: shows the controller's certificate, knows agents by theirs."""
        return self.identity_for(CONTROLLER_ID).server_context(client_certs)

    def identity_for(self, name: AgentId, also: tuple[str, ...] = ()) -> Identity:
        """An identity of the controller's own, kept below the CA's directory; signed anew when half of its life is over.

        `also` are further host names or addresses under which clients reach it.
        """
        identity = self._identities.get(name)
        if identity is None:
            directory = self.directory / "identities" / _checked_name(name)
            identity = Identity(directory, earliest_now_s=lambda: self._clock() - GRACE_S)
            self._identities[name] = identity
        now_s = self._clock()
        expires_s = identity.certificate_expires_s or 0.0
        if identity.ca_fingerprint != self.fingerprint or expires_s - now_s < CONTROLLER_LIFETIME_S / 2:
            pem = self._sign(identity.csr_pem(), name, now_s, CONTROLLER_LIFETIME_S, also)
            identity.save_certificate(pem, self.ca_pem)
        return identity

    def _sign(self, csr_pem: str, name: AgentId, now_s: float, lifetime_s: float, also: tuple[str, ...] = ()) -> str:
        request = parse_request(csr_pem)
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        key = request.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        certificate = (
            _builder(_checked_name(name), self._certificate.subject, key, self._key.public_key(), now_s, lifetime_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
            .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in (name, *also)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _load_or_create(self, path: Path) -> x509.Certificate:
        if not path.exists():
            write_atomically(path, self._self_signed().public_bytes(serialization.Encoding.PEM))
        try:
            certificate = parse_certificate(path.read_text())
        except (OSError, UnicodeDecodeError, InvalidInputError) as error:
            raise SettingsError(f"The CA certificate in {path} is damaged; restore it from a backup.") from error
        if key_fingerprint(certificate.public_key()) != key_fingerprint(self._key.public_key()):
            raise SettingsError(f"The CA certificate in {path} does not fit the key beside it; restore both.")
        return certificate

    def _self_signed(self) -> x509.Certificate:
        public = self._key.public_key()
        name = _name("Tidegate CA")
        return (
            _builder("Tidegate CA", name, public, public, self._clock(), CA_LIFETIME_S)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )


def public_key_fingerprint(csr_pem: str) -> str:
    """sha256 of the key that a signing request is for, hex. Raises InvalidInputError for a damaged request."""
    return key_fingerprint(parse_request(csr_pem).public_key())


def _alternative(name: str) -> x509.GeneralName:
    """A host name or an address, as a certificate says it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name[:80]!r} cannot be an agent's name.",
            found=name[:80],
            accepted="1 to 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit",
        )
    return name


def _builder(
    subject: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    now_s: float,
    lifetime_s: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(now_s - BACKDATE_S, UTC))
        .not_valid_after(datetime.fromtimestamp(now_s + lifetime_s, UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
