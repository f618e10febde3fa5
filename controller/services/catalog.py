"""The services that come with Tidegate, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from controller.models.registry import ModelRegistry
from policies.service import ServiceSpec

Register = Callable[[ModelRegistry, Path, Callable[[str], None]], ServiceSpec]
"""Fetches weights into the cache directory, registers the models, and returns the service; reports its progress in lines."""


def builtin_services() -> dict[str, Register]:
    """How to register each of them; what they need is imported when they are used."""
    return {"document-reader": _document_reader}


def _document_reader(registry: ModelRegistry, cache: Path, progress: Callable[[str], None]) -> ServiceSpec:
    from controller.services.document_reader import register

    return register(registry, cache, progress)
