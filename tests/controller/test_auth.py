"""Keys, roles, and what a web page of another site must not do."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from controller.auth import Keys, Role, is_foreign_page, is_loopback_name, keys_with_admin, load_or_create_admin_key


def test_a_key_has_its_role_and_no_other_key_has_one() -> None:
    keys = Keys(
        {hashlib.sha256(key.encode()).hexdigest(): role for key, role in (("v", Role.VIEWER), ("o", Role.OPERATOR))}
    )
    assert (keys.role_of("v"), keys.role_of("o"), keys.role_of("x"), keys.role_of("")) == (
        Role.VIEWER,
        Role.OPERATOR,
        None,
        None,
    )
    assert keys_with_admin("a").role_of("a") is Role.ADMIN
    assert Role.VIEWER < Role.OPERATOR < Role.ADMIN


def test_the_admin_key_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    key = load_or_create_admin_key(path)
    assert load_or_create_admin_key(path) == key
    assert len(key) > 40
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:80"]
)
def test_loopback_names(host: str) -> None:
    assert is_loopback_name(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "example.com",
        "127.0.0.1.example.com",
        "127.evil.com:8080",
        "localhost.example.com",
        "10.0.0.1",
        "[",
        "[::2]",
        "@127.0.0.1x",
    ],
)
def test_names_that_may_be_dns_rebinding(host: str) -> None:
    assert not is_loopback_name(host)


def test_a_page_is_foreign_unless_its_origin_is_the_host_that_was_asked() -> None:
    assert not is_foreign_page("127.0.0.1:8080", None)
    assert not is_foreign_page("127.0.0.1:8080", "http://127.0.0.1:8080")
    for origin in ("http://evil.example", "http://127.0.0.1:9999", "null", "", "http://["):
        assert is_foreign_page("127.0.0.1:8080", origin)
