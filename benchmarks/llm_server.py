"""A small server that speaks OpenAI's chat protocol well, badly or not at all: for tests and benchmarks, on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import msgspec


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP answer, and how it is spoilt."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""
    delay_s: float = 0.0
    """Silence before the first byte."""
    cut_at: int | None = None
    """The connection ends after this many bytes of the body."""
    drip_s: float = 0.0
    """Pause after each byte of the body."""


Script = Callable[[dict[str, Any]], Answer]


def says(content: object, finish_reason: str = "stop", **more: Any) -> Answer:
    """A chat completion with this content."""
    message = {"role": "assistant", "content": content, **more}
    return document(
        {
            "id": "1", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}],
            "usage": {"prompt_tokens": 900, "completion_tokens": 60, "total_tokens": 960},
        }
    )  # fmt: skip


def document(value: object, status: int = 200, **headers: str) -> Answer:
    """A JSON answer."""
    return Answer(
        status=status, headers={"content-type": "application/json", **headers}, body=json.dumps(value).encode()
    )


def refuses(status: int, **headers: str) -> Answer:
    """An error as OpenAI words it."""
    return document({"error": {"message": "no", "type": "error", "code": None}}, status, **headers)


class LlmServer:
    """Answers each chat completion with what the script says; use as an async context manager."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.first = asyncio.Event()
        """Somebody asked."""
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LlmServer:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # The client is gone, or the server is being closed: both end this connection.
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False when the connection ends with it."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head.split("\r\n")[1:])}
        body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.asked.append(json.loads(body))
        self.authorizations.append(fields.get("authorization", ""))
        self.first.set()
        answer = self.script(self.asked[-1])
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        lines = [f"HTTP/1.1 {answer.status} X", *(f"{k.replace('_', '-')}: {v}" for k, v in answer.headers.items())]
        writer.write("\r\n".join([*lines, f"content-length: {len(answer.body)}", "", ""]).encode())
        sent = answer.body if answer.cut_at is None else answer.body[: answer.cut_at]
        if answer.drip_s:
            for at in range(len(sent)):
                writer.write(sent[at : at + 1])
                await writer.drain()
                await asyncio.sleep(answer.drip_s)
        else:
            writer.write(sent)
            await writer.drain()
        return answer.cut_at is None
