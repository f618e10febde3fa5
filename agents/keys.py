"""Private keys and certificates on a disk, and their fingerprints."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sla.errors import InvalidInputError, SettingsError

BACKDATE_S: Final = 86_400.0
"""Certificates begin this long before they are issued."""
_MAX_PEM_LENGTH: Final = 16 * 1024

PrivateKey = ec.EllipticCurvePrivateKey


def load_or_create_key(path: Path) -> PrivateKey:
    """The EC P-256 key in `path`, made with mode 0600 if there is none. Raises SettingsError if the file is damaged."""
    if not path.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        _create(path, pem)
    # Read again even after creating: another process may have been first, and its key counts.
    try:
        loaded = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"The key in {path} is damaged; restore it, or delete it to start anew.") from error
    except OSError as error:
        raise SettingsError(f"The key in {path} cannot be read: {error.strerror or error}.") from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"The key in {path} is not an elliptic-curve key.")
    return loaded


def write_atomically(path: Path, data: bytes) -> None:
    """`path` holds all of `data` or what it held before, also after a crash; mode 0600."""
    temporary = _write_temporary(path, data)
    os.replace(temporary, path)


def _create(path: Path, data: bytes) -> None:
    """Like `write_atomically`, but a file that is there meanwhile is kept."""
    temporary = _write_temporary(path, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # Some file systems of boards (vfat) have no links.
        os.replace(temporary, path)
        return
    temporary.unlink()


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SettingsError(f"{path} cannot be written: {error.strerror or error}.") from error
    return temporary


def parse_certificate(pem: str) -> x509.Certificate:
    """The one certificate in `pem`. Raises InvalidInputError."""
    try:
        if len(pem) > _MAX_PEM_LENGTH:
            raise ValueError("too long")
        certificates = x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise InvalidInputError("A certificate is damaged: it must be one PEM block.") from error
    if len(certificates) != 1:
        raise InvalidInputError(f"One certificate is expected, not {len(certificates)}.")
    return certificates[0]


def parse_request(pem: str) -> x509.CertificateSigningRequest:
    """A signing request whose sender holds the EC P-256 key that it names. Raises InvalidInputError."""
    try:
        if len(pem) > _MAX_PEM_LENGTH:
            raise ValueError("too long")
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidInputError("The certificate request is damaged: it must be one PEM block.") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidInputError("The certificate request must be for an EC P-256 key.")
    if not is_signed:
        raise InvalidInputError("The certificate request is not signed by its own key.")
    return request


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """True if `issuer` signed `certificate`."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """sha256 of the DER form, hex."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def key_fingerprint(key: object) -> str:
    """sha256 of the public key's SubjectPublicKeyInfo, hex."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInputError("Only elliptic-curve keys are used here.")
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(spki)
    return digest.finalize().hex()
