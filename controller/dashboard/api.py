"""The public API as the dashboard calls it: with one user's key, or with none where none is needed."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

import httpx

from sla.errors import RetryableError

TIMEOUT_S = 3.0
ACTION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the API said."""

    status: int
    content: bytes
    document: Any
    """The decoded JSON; None where there is none."""

    @property
    def ok(self) -> bool:
        """True if what was asked for was done."""
        return self.status < 400

    @property
    def sentence(self) -> str:
        """Why it was not done."""
        detail = self.document.get("detail") if isinstance(self.document, dict) else None
        return str(detail or f"The controller answered {self.status}.")

    @property
    def pointer(self) -> str:
        """The field that is wrong (JSON pointer); empty if it is not about a field."""
        pointer = self.document.get("pointer") if isinstance(self.document, dict) else None
        return str(pointer or "")


class Api:
    """Calls with one key. Raises RetryableError when there is no answer; any answer is an Answer."""

    def __init__(self, url: str, *, ca_pem: str, key: str | None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, verify=_tls(url, ca_pem), trust_env=False
        )

    async def get(self, path: str, **params: str | int) -> Answer:
        """The answer of a GET."""
        return await self._call("GET", path, TIMEOUT_S, params=params)

    async def post(
        self, path: str, *, json: Any = None, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """The answer of a POST."""
        return await self._call("POST", path, ACTION_TIMEOUT_S, json=json, content=body, headers=headers)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _call(self, method: str, path: str, timeout_s: float, **options: Any) -> Answer:
        try:
            response = await self._http.request(method, path, timeout=timeout_s, **options)
        except httpx.TimeoutException as error:
            raise RetryableError("The controller did not answer in time.") from error
        except httpx.HTTPError as error:
            raise RetryableError("The controller cannot be reached.") from error
        return Answer(response.status_code, response.content, _document(response))


def _tls(url: str, ca_pem: str) -> ssl.SSLContext:
    """Trusts our own authority alone. The name is not checked: the page calls the address that it listens on itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    if url.startswith("https:"):
        context.load_verify_locations(cadata=ca_pem)
    return context


def _document(response: httpx.Response) -> Any:
    if "json" not in response.headers.get("content-type", ""):
        return None
    try:
        return response.json()
    except ValueError:
        return None
