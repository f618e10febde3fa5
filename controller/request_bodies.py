"""Reading the bodies of requests, bounded."""

from __future__ import annotations

from fastapi import Request

from sla.errors import InvalidInputError


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises InvalidInputError as soon as it is longer than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise InvalidInputError(
                f"The body has more than {limit} bytes.", found=f"over {limit} bytes", accepted=f"at most {limit} bytes"
            )
        parts.append(part)
    return b"".join(parts)
