"""Who may do what: API keys with roles, and what a browser page on the same machine must not do."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from urllib.parse import urlsplit


class Role(IntEnum):
    """Each role may do what the ones below it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Keys:
    """Hashes of API keys with their roles; the keys themselves are not kept."""

    roles: dict[str, Role]

    def role_of(self, key: str) -> Role | None:
        """The role of a key, None if it is not one of ours. Takes the same time whichever key is near."""
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = None
        for known, role in self.roles.items():
            if hmac.compare_digest(known, digest):
                found = role
        return found


def keys_with_admin(admin_key: str) -> Keys:
    """Keys that know one administrator."""
    return Keys({hashlib.sha256(admin_key.encode()).hexdigest(): Role.ADMIN})


def load_or_create_admin_key(path: Path) -> str:
    """The key in `path`, readable by its owner only; made on first use."""
    if path.exists():
        return path.read_text().strip()
    key = f"tga_{secrets.token_urlsafe(32)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
    return key


def is_foreign_page(host_header: str, origin: str | None) -> bool:
    """True for a request that a web page of another site made the browser send (cross-site request forgery)."""
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc != host_header
    except ValueError:
        return True


def is_loopback_name(host_header: str) -> bool:
    """True if the client asked for this machine by a loopback name; anything else may be DNS rebinding."""
    try:
        name = urlsplit(f"//{host_header}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False  # Such as 127.0.0.1.example.com, which begins well.
