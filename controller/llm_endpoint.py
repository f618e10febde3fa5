"""One OpenAI-compatible endpoint: asked within a deadline and a budget, believed in nothing.

The form of `response_format` that it takes (json_schema, json_object, none) is found by trying and remembered. A refusal for load is
waited out as its `Retry-After` says, with jitter, as long as the deadline lets it; several failures in a row open a circuit
breaker. The address and the key stand in no error and in no log.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import random
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from controller.clock import Clock
from controller.settings import LlmSettings
from policies.llm import Message
from sla.errors import RetryableError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

BREAK_AFTER = 3
BREAK_S = 120.0
MAX_BODY_BYTES = 256 * 1024
MAX_TRIES = 4
HOUR_MS = 3_600_000.0

Reason = Literal[
    "timeout", "unreachable", "http-error", "rate-limited", "no-completion", "cut-off", "too-long", "refusal", "malformed", "breaker",
    "budget", "epoch",
]  # fmt: skip
_FORMATS = ("json_schema", "json_object", "plain")


class LlmUnusableError(RetryableError):
    """No usable answer; `reason` says why in a word."""

    slug = "llm-unusable"

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason: Reason = reason


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What the model wrote, and what that took."""

    text: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that the server had read before (its prompt cache), where it says so."""


class LlmEndpoint:
    """Owned by the event loop. Callers limit how many ask at the same time."""

    def __init__(self, settings: LlmSettings, clock: Clock, *, seed: int = 0) -> None:
        self._settings = settings
        self._clock = clock
        self._chance = random.Random(seed)
        self._client: AsyncOpenAI | None = None
        self._format = 0
        self._failures = 0
        self._closed_until_ms = float("-inf")
        self._wait_until_ms = float("-inf")
        self._spent: deque[tuple[float, int]] = deque()

    @property
    def response_format(self) -> str:
        """The form that is asked for now."""
        return _FORMATS[self._format]

    def why_not(self) -> Reason | None:
        """Why it may not be asked now, None if it may."""
        now_ms = self._clock.now_ms()
        if now_ms < self._closed_until_ms:
            return "breaker"
        if now_ms < self._wait_until_ms:
            return "rate-limited"
        return "budget" if self.tokens_this_hour() >= self._settings.tokens_per_hour else None

    def tokens_this_hour(self) -> int:
        """Tokens that were paid for in the last hour."""
        while self._spent and self._clock.now_ms() - self._spent[0][0] >= HOUR_MS:
            self._spent.popleft()
        return sum(tokens for _, tokens in self._spent)

    def succeeded(self) -> None:
        """An answer was of use: the breaker counts anew."""
        self._failures = 0

    def failed(self) -> None:
        """An answer was of no use; enough of them in a row, and nobody is asked for a while."""
        self._failures += 1
        if self._failures >= BREAK_AFTER:
            self._closed_until_ms = self._clock.now_ms() + BREAK_S * 1000

    async def complete(self, messages: list[Message], schema: dict[str, object], deadline_s: float) -> Completion:
        """What the model says. Raises LlmUnusableError, after at most `deadline_s` seconds."""
        until_s = asyncio.get_running_loop().time() + deadline_s
        try:
            async with asyncio.timeout_at(until_s):
                return await self._with_patience(messages, schema, until_s)
        except TimeoutError:
            raise LlmUnusableError("timeout", f"The model did not answer within {deadline_s:g} s.") from None

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def _with_patience(self, messages: list[Message], schema: dict[str, object], until_s: float) -> Completion:
        first = self._format
        for attempt in range(MAX_TRIES + len(_FORMATS)):
            try:
                return self._paid(await self._once(messages, schema))
            except _FormatRefusedError:
                self._format += 1
            except LlmUnusableError as error:
                if error.reason == "http-error":
                    self._format = first  # It takes no form of this question, so the form was not what it minds.
                if error.reason not in ("rate-limited", "unreachable") or attempt >= MAX_TRIES - 1:
                    raise
                pause_s = error.retry_after_s * (1.0 + 0.25 * self._chance.random())
                if asyncio.get_running_loop().time() + pause_s >= until_s:
                    self._wait_until_ms = self._clock.now_ms() + 1000 * pause_s
                    raise
                await asyncio.sleep(pause_s)
        raise LlmUnusableError("http-error", "The endpoint takes no form of request.")

    async def _once(self, messages: list[Message], schema: dict[str, object]) -> Completion:
        import openai  # only when an endpoint is configured: it takes a second and 60 MB

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self._settings.base_url, api_key=self._settings.api_key or "none",
                timeout=self._settings.deadline_s, max_retries=0,
            )  # fmt: skip
        try:
            asked = self._client.chat.completions.with_streaming_response.create(
                model=self._settings.model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=self._settings.max_output_tokens,
                temperature=0.0,
                **self._format_option(schema),
            )
            async with asked as response:
                return _completion(await _bounded(response.iter_bytes()))
        except openai.APIStatusError as error:
            raise self._judged(error.status_code, error.response.headers.get("retry-after")) from None
        except openai.APITimeoutError:
            raise LlmUnusableError("timeout", "The model did not answer in time.") from None
        except openai.APIConnectionError:
            raise LlmUnusableError("unreachable", "The endpoint cannot be reached.", retry_after_s=0.5) from None
        except openai.OpenAIError:
            raise LlmUnusableError("http-error", "The endpoint's answer makes no sense.") from None
        except (ValueError, RecursionError, OSError) as error:
            raise LlmUnusableError("no-completion", "The endpoint's answer is no chat completion.") from error

    def _judged(self, status: int, retry_after: str | None) -> Exception:
        if status in (400, 404, 415, 422, 501) and self._format < len(_FORMATS) - 1:
            return _FormatRefusedError()
        if status in (429, 503, 529):
            wait_s = _seconds(retry_after, self._clock.wall_s())
            return LlmUnusableError("rate-limited", f"The endpoint answered {status}.", retry_after_s=wait_s)
        return LlmUnusableError("http-error", f"The endpoint answered {status}.")

    def _format_option(self, schema: dict[str, object]) -> dict[str, Any]:
        if self.response_format == "json_schema":
            return {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": False, "schema": schema},
                }
            }
        return {"response_format": {"type": "json_object"}} if self.response_format == "json_object" else {}

    def _paid(self, completion: Completion) -> Completion:
        self._spent.append((self._clock.now_ms(), completion.prompt_tokens + completion.output_tokens))
        return completion


class _FormatRefusedError(Exception):
    """The endpoint may take another form of `response_format`."""


async def _bounded(chunks: Any) -> bytes:
    """A whole body. Raises LlmUnusableError when it is cut off or longer than anybody needs."""
    body = bytearray()
    try:
        async for chunk in chunks:
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                raise LlmUnusableError("too-long", f"The endpoint's answer has more than {MAX_BODY_BYTES} bytes.")
    except LlmUnusableError:
        raise
    except Exception as error:
        # Which HTTP library raises here, and what, has changed between versions of `openai`.
        raise LlmUnusableError("cut-off", "The endpoint's answer broke off.") from error
    return bytes(body)


def _completion(body: bytes) -> Completion:
    """Raises LlmUnusableError, ValueError."""
    if body.lstrip()[:5] == b"data:":
        content, finish, usage = _streamed(body)
    else:
        document = json.loads(body)
        try:
            choice = document["choices"][0]
            message = choice["message"]
            content, finish, usage = _text(message.get("content")), choice.get("finish_reason"), document.get("usage")
            if not content and message.get("refusal"):
                raise LlmUnusableError("refusal", "The model refused.")
        except (AttributeError, IndexError, KeyError, TypeError):
            raise LlmUnusableError("no-completion", "The endpoint's answer is no chat completion.") from None
    if finish == "length":
        raise LlmUnusableError("cut-off", "The reply was cut off.")
    if finish == "content_filter":
        raise LlmUnusableError("refusal", "The model's reply was filtered.")
    counted = usage if isinstance(usage, dict) else {}
    details = counted.get("prompt_tokens_details")
    return Completion(
        text=content,
        cached_tokens=_count(details.get("cached_tokens"), 0) if isinstance(details, dict) else 0,
        prompt_tokens=_count(counted.get("prompt_tokens"), 0),
        output_tokens=_count(counted.get("completion_tokens"), len(content) // 4 + 1),
    )


def _streamed(body: bytes) -> tuple[str, object, object]:
    """An answer in pieces, from a server that sends them although nobody asked. Raises LlmUnusableError when the end is missing."""
    parts, finish, usage = [], None, None
    for line in body.decode("utf-8", "replace").splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        try:
            chunk = json.loads(data)
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", [])[:1]:
                parts.append(_text(choice.get("delta", {}).get("content")))
                finish = choice.get("finish_reason") or finish
        except (ValueError, AttributeError, TypeError):
            raise LlmUnusableError("cut-off", "The endpoint's answer broke off.") from None
    if finish is None:
        raise LlmUnusableError("cut-off", "The endpoint's answer broke off.")
    return "".join(parts), finish, usage


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 10_000_000 else default


def _seconds(retry_after: str | None, wall_s: float) -> float:
    """What a Retry-After header says, bounded to 0.1 s to one hour; one second without one."""
    wait_s = 1.0
    if retry_after is not None:
        try:
            wait_s = float(retry_after)
        except ValueError:
            try:
                wait_s = email.utils.parsedate_to_datetime(retry_after).timestamp() - wall_s
            except ValueError:
                wait_s = 1.0
    return min(max(wait_s, 0.1), 3600.0) if wait_s == wait_s else 1.0
