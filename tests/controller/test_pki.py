"""The certificate authority."""

from __future__ import annotations

import hashlib
import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agents.identity import CONTROLLER_ID, Identity
from controller.pki import GRACE_S, CertificateAuthority, public_key_fingerprint
from policies.ids import AgentId
from sla.errors import InvalidInputError, SettingsError

NOW_S = 1_790_000_000.0
DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ca(tmp_path: Path, clock: Clock) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca", clock=clock)


@pytest.fixture
def device(tmp_path: Path) -> Identity:
    return Identity(tmp_path / "device")


def csr(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "controller")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def test_opening_it_again_gives_the_same_authority(tmp_path: Path, ca: CertificateAuthority) -> None:
    again = CertificateAuthority(tmp_path / "ca")
    assert again.ca_pem == ca.ca_pem
    assert stat.S_IMODE((tmp_path / "ca" / "ca-key.pem").stat().st_mode) == 0o600


def test_the_fingerprint_is_sha256_of_the_der_form(ca: CertificateAuthority) -> None:
    der = ssl.PEM_cert_to_DER_cert(ca.ca_pem)
    assert ca.fingerprint == hashlib.sha256(der).hexdigest()


def test_a_crash_after_the_key_is_finished_later(tmp_path: Path, ca: CertificateAuthority) -> None:
    (tmp_path / "ca" / "ca.pem").unlink()
    again = CertificateAuthority(tmp_path / "ca")
    assert again.fingerprint != ca.fingerprint
    assert CertificateAuthority(tmp_path / "ca").fingerprint == again.fingerprint


def test_damaged_files_are_one_sentence(tmp_path: Path, ca: CertificateAuthority) -> None:
    path = tmp_path / "ca" / "ca.pem"
    path.write_text(CertificateAuthority(tmp_path / "other").ca_pem)
    with pytest.raises(SettingsError, match="does not fit the key"):
        CertificateAuthority(tmp_path / "ca")
    path.write_text("garbage")
    with pytest.raises(SettingsError, match="is damaged"):
        CertificateAuthority(tmp_path / "ca")
    (tmp_path / "ca" / "ca-key.pem").write_text("garbage")
    with pytest.raises(SettingsError, match="is damaged"):
        CertificateAuthority(tmp_path / "ca")


def test_an_agents_certificate(ca: CertificateAuthority, device: Identity) -> None:
    pem = ca.sign_agent(device.csr_pem(), AgentId("board-1"), now_s=NOW_S)
    certificate = x509.load_pem_x509_certificate(pem.encode())
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(ca.ca_pem.encode()))
    assert certificate.subject.rfc4514_string() == "CN=board-1"
    assert certificate.not_valid_before_utc == datetime.fromtimestamp(NOW_S - DAY_S, UTC)
    assert certificate.not_valid_after_utc == datetime.fromtimestamp(NOW_S + DAY_S, UTC)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}


def test_the_name_in_the_request_does_not_count(ca: CertificateAuthority) -> None:
    request = csr(ec.generate_private_key(ec.SECP256R1()))
    pem = ca.sign_agent(request, AgentId("board-1"), now_s=NOW_S, lifetime_s=60)
    certificate = x509.load_pem_x509_certificate(pem.encode())
    assert certificate.subject.rfc4514_string() == "CN=board-1"
    assert certificate.not_valid_after_utc == datetime.fromtimestamp(NOW_S + 60, UTC)


@pytest.mark.parametrize("name", ["", "controller", "a/b", "../x", "a" * 64, "-a", "ä", "a\n"])
def test_names_that_an_agent_cannot_have(ca: CertificateAuthority, device: Identity, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"named|name"):
        ca.sign_agent(device.csr_pem(), AgentId(name), now_s=NOW_S)


def test_requests_that_are_not_signed(ca: CertificateAuthority, device: Identity) -> None:
    lines = device.csr_pem().splitlines()
    tampered = "\n".join([*lines[:-2], "A" * len(lines[-2]), lines[-1]])
    requests = {
        "": "damaged",
        "x" * 20_000: "damaged",
        "not\x00pem": "damaged",
        csr(rsa.generate_private_key(65537, 2048)): "EC P-256",
        csr(ec.generate_private_key(ec.SECP384R1())): "EC P-256",
        tampered: "damaged|signed by its own key",
    }
    for request, sentence in requests.items():
        with pytest.raises(InvalidInputError, match=sentence):
            ca.sign_agent(request, AgentId("board-1"), now_s=NOW_S)
        with pytest.raises(InvalidInputError, match=sentence):
            public_key_fingerprint(request)


def test_a_request_names_its_key(device: Identity) -> None:
    assert public_key_fingerprint(device.csr_pem()) == device.public_key_fingerprint()


def test_the_controllers_own_identity_is_kept_and_renewed(ca: CertificateAuthority, clock: Clock) -> None:
    first = ca.identity_for(CONTROLLER_ID)
    assert first.agent_id == CONTROLLER_ID
    assert ca.identity_for(CONTROLLER_ID).certificate_expires_s == first.certificate_expires_s
    clock.now_s += 60 * DAY_S
    renewed = ca.identity_for(CONTROLLER_ID)
    assert renewed.certificate_expires_s == clock.now_s + 90 * DAY_S
    assert renewed.public_key_fingerprint() == first.public_key_fingerprint()


def test_the_controllers_own_certificate_is_renewed_while_it_runs(
    ca: CertificateAuthority, clock: Clock, device: Identity
) -> None:
    own = ca.identity_for(CONTROLLER_ID)
    ca.server_context()
    clock.now_s += 60 * DAY_S
    ca.sign_agent(device.csr_pem(), AgentId("board-1"), now_s=clock.now_s)
    assert own.certificate_expires_s == clock.now_s + 90 * DAY_S


def test_the_door_gives_grace_by_the_controllers_clock(ca: CertificateAuthority, clock: Clock) -> None:
    context = ca.server_context("optional")
    assert context.verify_mode is ssl.CERT_OPTIONAL
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    clock.now_s += 1000
    assert context.earliest_now_s() == NOW_S + 1000 - GRACE_S


def test_a_new_ca_makes_new_identities(tmp_path: Path, ca: CertificateAuthority) -> None:
    ca.identity_for(CONTROLLER_ID)
    (tmp_path / "ca" / "ca.pem").unlink()
    (tmp_path / "ca" / "ca-key.pem").unlink()
    new_ca = CertificateAuthority(tmp_path / "ca")
    assert new_ca.identity_for(CONTROLLER_ID).ca_fingerprint == new_ca.fingerprint
