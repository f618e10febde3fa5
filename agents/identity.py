"""Who this process is: a key that never leaves its disk, and the CA's certificate for it."""

from __future__ import annotations

import hmac
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from agents import tls
from agents.keys import (
    BACKDATE_S,
    certificate_fingerprint,
    is_issued_by,
    key_fingerprint,
    load_or_create_key,
    parse_certificate,
    write_atomically,
)
from policies.ids import AgentId
from sla.errors import InvalidInputError, RefusedError, SettingsError

CONTROLLER_ID: Final = AgentId("controller")
"""Common name of the controller's own certificate; no agent may bear it."""


class Identity:
    """The key and certificate in one directory (`key.pem`, `certificate.pem`, `ca.pem`).

    Contexts that were handed out follow a renewal: later handshakes show the new certificate.
    """

    def __init__(self, directory: Path, *, earliest_now_s: Callable[[], float] | None = None) -> None:
        """Makes the key if there is none. `earliest_now_s` gives a Unix time that has certainly passed, if one is known."""
        self.directory = directory
        self._key_path = directory / "key.pem"
        self._certificate_path = directory / "certificate.pem"
        self._ca_path = directory / "ca.pem"
        self._key = load_or_create_key(self._key_path)
        self._certificate: x509.Certificate | None = None
        self._ca: x509.Certificate | None = None
        self._earliest_now_s = earliest_now_s or self._issued_s
        self._contexts: weakref.WeakSet[tls.PeerContext] = weakref.WeakSet()
        self._load()

    def csr_pem(self) -> str:
        """A signing request for the key; the CA chooses the name."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "agent")])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self._key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()

    def public_key_fingerprint(self) -> str:
        """sha256 of the public key, hex: what stays the same when the certificate is renewed."""
        return key_fingerprint(self._key.public_key())

    @property
    def agent_id(self) -> AgentId | None:
        """The name the CA gave; None before enrollment."""
        if self._certificate is None:
            return None
        names = self._certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return AgentId(str(names[0].value))

    @property
    def certificate_expires_s(self) -> float | None:
        """Unix time by the CA's clock; None before enrollment."""
        return self._certificate.not_valid_after_utc.timestamp() if self._certificate else None

    @property
    def ca_fingerprint(self) -> str | None:
        """sha256 of the CA certificate, hex; None before enrollment."""
        return certificate_fingerprint(self._ca) if self._ca else None

    def renew_in_s(self, now_s: float) -> float:
        """Seconds until half of the certificate's life is over; 0 if it is time.

        Counted on the local clock from the moment the certificate was saved, so that it works with a clock that is years off.
        A clock that jumped, in either direction, makes the renewal due.
        """
        if self._certificate is None:
            return 0.0
        half_life_s = (self._certificate.not_valid_after_utc.timestamp() - self._issued_s()) / 2
        age_s = now_s - self._certificate_path.stat().st_mtime
        return max(0.0, half_life_s - age_s) if age_s >= -1.0 else 0.0

    def save_certificate(self, certificate_pem: str, ca_pem: str) -> None:
        """Keep a certificate for this key. Raises RefusedError if it is for another key or not signed by this CA."""
        certificate, ca = parse_certificate(certificate_pem), parse_certificate(ca_pem)
        if not self._belongs(certificate, ca):
            raise RefusedError("The certificate that came back is not for this device's key, or not signed by the CA.")
        # In this order: after a crash in between, the old certificate does not fit the CA and counts as none.
        write_atomically(self._ca_path, ca_pem.encode())
        write_atomically(self._certificate_path, certificate_pem.encode())
        self._certificate, self._ca = certificate, ca
        for context in self._contexts:
            tls.load_own_certificate(context, self._certificate_path, self._key_path)

    def client_context(self) -> tls.PeerContext:
        """For dialling the controller or a peer. Raises SettingsError before enrollment."""
        return self._with_certificate(tls.client_context(self._ca_pem(), self._earliest_now_s))

    def server_context(self, clients: tls.ClientCertificates = "required") -> tls.PeerContext:
        """For a door that takes clients with a certificate by the same CA. Raises SettingsError before enrollment."""
        return self._with_certificate(tls.server_context(self._ca_pem(), self._earliest_now_s, clients))

    def _with_certificate(self, context: tls.PeerContext) -> tls.PeerContext:
        tls.load_own_certificate(context, self._certificate_path, self._key_path)
        self._contexts.add(context)
        return context

    def _ca_pem(self) -> str:
        if self._ca is None:
            raise SettingsError("This device has no certificate yet; enroll it first (tidegate agent join).")
        return self._ca.public_bytes(serialization.Encoding.PEM).decode()

    def _issued_s(self) -> float:
        """When the CA signed our certificate: the newest date that is known for certain to have passed."""
        return self._certificate.not_valid_before_utc.timestamp() + BACKDATE_S if self._certificate else 0.0

    def _load(self) -> None:
        try:
            certificate = parse_certificate(self._certificate_path.read_text())
            ca = parse_certificate(self._ca_path.read_text())
        except FileNotFoundError:
            return
        except (InvalidInputError, UnicodeDecodeError):
            return  # Half of an enrollment: the same key may finish it.
        except OSError as error:
            raise SettingsError(f"The certificate in {self.directory} cannot be read: {error.strerror}.") from error
        if self._belongs(certificate, ca):
            self._certificate, self._ca = certificate, ca

    def _belongs(self, certificate: x509.Certificate, ca: x509.Certificate) -> bool:
        is_ours = hmac.compare_digest(key_fingerprint(certificate.public_key()), self.public_key_fingerprint())
        has_name = bool(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
        return is_ours and has_name and is_issued_by(certificate, ca)
