"""The identity of a device on its disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from agents.identity import Identity
from controller.pki import CertificateAuthority
from policies.ids import AgentId
from sla.errors import InvalidInputError, RefusedError, SettingsError

NOW_S = 1_790_000_000.0
DAY_S = 86_400.0


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "ca", clock=lambda: NOW_S)


def certify(identity: Identity, ca: CertificateAuthority, name: str = "board-1", now_s: float = NOW_S) -> None:
    identity.save_certificate(ca.sign_agent(identity.csr_pem(), AgentId(name), now_s=now_s), ca.ca_pem)


def test_the_key_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    first, second = Identity(tmp_path / "device"), Identity(tmp_path / "device")
    assert first.public_key_fingerprint() == second.public_key_fingerprint()
    assert stat.S_IMODE((tmp_path / "device" / "key.pem").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "device").iterdir()] == ["key.pem"]


def test_two_devices_have_two_keys(tmp_path: Path) -> None:
    left, right = Identity(tmp_path / "a"), Identity(tmp_path / "b")
    assert left.public_key_fingerprint() != right.public_key_fingerprint()


def test_before_enrollment_there_is_no_name(tmp_path: Path) -> None:
    identity = Identity(tmp_path)
    assert identity.agent_id is None
    assert identity.certificate_expires_s is None
    assert identity.ca_fingerprint is None
    assert identity.renew_in_s(NOW_S) == 0
    with pytest.raises(SettingsError, match="enroll it first"):
        identity.client_context()
    with pytest.raises(SettingsError, match="enroll it first"):
        identity.server_context()


def test_a_certificate_survives_a_restart(tmp_path: Path, ca: CertificateAuthority) -> None:
    certify(Identity(tmp_path / "device"), ca)
    again = Identity(tmp_path / "device")
    assert again.agent_id == "board-1"
    assert again.certificate_expires_s == NOW_S + DAY_S
    assert again.ca_fingerprint == ca.fingerprint


def test_a_certificate_for_another_key_is_refused(tmp_path: Path, ca: CertificateAuthority) -> None:
    mine, other = Identity(tmp_path / "mine"), Identity(tmp_path / "other")
    pem = ca.sign_agent(other.csr_pem(), AgentId("board-1"), now_s=NOW_S)
    with pytest.raises(RefusedError, match="not for this device's key"):
        mine.save_certificate(pem, ca.ca_pem)
    assert mine.agent_id is None


def test_a_certificate_by_another_ca_is_refused(tmp_path: Path, ca: CertificateAuthority) -> None:
    identity, other_ca = Identity(tmp_path / "device"), CertificateAuthority(tmp_path / "other-ca")
    pem = ca.sign_agent(identity.csr_pem(), AgentId("board-1"), now_s=NOW_S)
    with pytest.raises(RefusedError, match="not signed by the CA"):
        identity.save_certificate(pem, other_ca.ca_pem)


@pytest.mark.parametrize("pem", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_refused(tmp_path: Path, ca: CertificateAuthority, pem: str) -> None:
    with pytest.raises(InvalidInputError, match="certificate"):
        Identity(tmp_path / "device").save_certificate(pem, ca.ca_pem)


def test_half_an_enrollment_counts_as_none(tmp_path: Path, ca: CertificateAuthority) -> None:
    directory = tmp_path / "device"
    certify(Identity(directory), ca)
    other_ca = CertificateAuthority(tmp_path / "other-ca")
    (directory / "ca.pem").write_text(other_ca.ca_pem)  # a crash between the two files of a new enrollment
    identity = Identity(directory)
    assert identity.agent_id is None
    certify(identity, other_ca, "board-2")
    assert Identity(directory).agent_id == "board-2"
    (directory / "certificate.pem").write_text("cut of")
    assert Identity(directory).agent_id is None


def test_a_damaged_key_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("garbage")
    with pytest.raises(SettingsError, match=r"The key in .*key\.pem is damaged"):
        Identity(tmp_path)


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        Identity(tmp_path / "file" / "device")


def test_renewal_is_due_at_half_life_on_the_local_clock(tmp_path: Path, ca: CertificateAuthority) -> None:
    identity = Identity(tmp_path / "device")
    certify(identity, ca)
    saved_s = 315_532_800.0  # the board believes that it is 1980
    os.utime(tmp_path / "device" / "certificate.pem", (saved_s, saved_s))
    assert identity.renew_in_s(saved_s) == DAY_S / 2
    assert identity.renew_in_s(saved_s + 1000) == DAY_S / 2 - 1000
    assert identity.renew_in_s(saved_s + DAY_S) == 0
    assert identity.renew_in_s(saved_s - 1_000_000) == 0, "the clock jumped back"
    assert identity.renew_in_s(NOW_S) == 0, "the clock was set right"


def test_contexts_know_that_the_newest_certificate_was_issued_in_the_past(
    tmp_path: Path, ca: CertificateAuthority
) -> None:
    identity = Identity(tmp_path / "device")
    certify(identity, ca)
    client, server = identity.client_context(), identity.server_context()
    assert client.earliest_now_s() == server.earliest_now_s() == NOW_S
    certify(identity, ca, now_s=NOW_S + 500)
    assert client.earliest_now_s() == server.earliest_now_s() == NOW_S + 500
