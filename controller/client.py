"""A small synchronous client of the public API: the command line, the demo and the local stack use nothing else."""

from __future__ import annotations

import ssl
import time
from typing import Any

import httpx

from sla.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    PermanentError,
    RefusedError,
    RetryableError,
    SettingsError,
    TidegateError,
)

_BY_STATUS: dict[int, type[TidegateError]] = {
    401: RefusedError,
    403: RefusedError,
    404: NotFoundError,
    502: RetryableError,
    504: RetryableError,
    503: OverloadedError,
}


class ApiClient:
    """Speaks to one controller. Every failure is a TidegateError whose text is a sentence for the user."""

    def __init__(
        self, url: str, *, key: str | None = None, ca_file: str | None = None, timeout_s: float = 30.0
    ) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        verify = _trust(ca_file) if ca_file else True
        self.url = url.rstrip("/")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s, verify=verify, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        """The decoded answer of a GET."""
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None})

    def get_bytes(self, path: str, **params: Any) -> bytes:
        """The answer of a GET as it is."""
        return self._send("GET", path, params={k: v for k, v in params.items() if v is not None}).content

    def post(
        self,
        path: str,
        *,
        body: bytes | None = None,
        json: Any = None,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """The decoded answer of a POST."""
        return self._call("POST", path, content=body, json=json, headers=headers, **_timeout(timeout_s))

    def put(self, path: str, *, body: bytes | None = None, json: Any = None, timeout_s: float | None = None) -> Any:
        """The decoded answer of a PUT."""
        return self._call("PUT", path, content=body, json=json, **_timeout(timeout_s))

    def delete(self, path: str) -> Any:
        """The decoded answer of a DELETE, when it is gone."""
        return self._call("DELETE", path)

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the controller is ready. Raises RetryableError when it is not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.get("/readyz")["ready"]:
                    return
            except RetryableError:
                pass
            if time.monotonic() > deadline:
                raise RetryableError(f"The controller at {self.url} was not ready after {timeout_s:.0f} s.")
            time.sleep(0.1)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, method: str, path: str, **options: Any) -> Any:
        response = self._send(method, path, **options)
        return (
            response.json()
            if response.content and "json" in response.headers.get("content-type", "")
            else response.text
        )

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TimeoutException as error:
            raise RetryableError(f"The controller at {self.url} did not answer in time.") from error
        except httpx.HTTPError as error:
            raise RetryableError(
                f"There is no controller at {self.url} ({error}); start one with: tidegate up"
            ) from error
        if response.status_code >= 400:
            raise _error(response)
        return response


def _trust(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"The CA certificate {ca_file} cannot be used: {error}.") from None


def _timeout(timeout_s: float | None) -> dict[str, Any]:
    return {} if timeout_s is None else {"timeout": timeout_s}


def _error(response: httpx.Response) -> TidegateError:
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        document = {}
    detail = str(document.get("detail") or f"The controller answered {response.status_code}.")
    if response.status_code == 422:
        return InvalidInputError(
            detail,
            pointer=document.get("pointer", ""),
            found=document.get("found", ""),
            accepted=document.get("accepted", ""),
        )
    if response.status_code == 409:
        return ConflictError(detail, current_version=document.get("current_version"))
    return _BY_STATUS.get(response.status_code, PermanentError)(detail)
