"""Which browser session signed in with which API key. Kept in memory only: a key must not lie on the controller's disk."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_SESSIONS = 1000


@dataclass(slots=True)
class SignIns:
    """Keys by session id (a random name in a signed cookie). The least recently used ones go first when there are too many."""

    _keys: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def key_of(self, session: str) -> str | None:
        """The key that this session signed in with."""
        if session in self._keys:
            self._keys.move_to_end(session)
        return self._keys.get(session)

    def sign_in(self, session: str, key: str) -> None:
        """Remember a key that the API took."""
        self._keys[session] = key
        self._keys.move_to_end(session)
        while len(self._keys) > MAX_SESSIONS:
            self._keys.popitem(last=False)

    def sign_out(self, session: str) -> None:
        """Forget the key."""
        self._keys.pop(session, None)
