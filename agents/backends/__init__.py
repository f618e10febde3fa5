"""The hardware seam: one narrow protocol, one module per vendor, imported only when it is used."""

from agents.backends.base import InferenceBackend
from agents.backends.factory import open_backend

__all__ = ["InferenceBackend", "open_backend"]
