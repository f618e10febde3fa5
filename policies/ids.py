"""The identifiers that all floors share. Each is a plain string on the wire."""

from __future__ import annotations

from typing import NewType

AgentId = NewType("AgentId", str)
ServiceId = NewType("ServiceId", str)
ModelName = NewType("ModelName", str)
StageName = NewType("StageName", str)
BlobHash = NewType("BlobHash", str)
"""sha256 of a file's content, 64 hex digits."""
