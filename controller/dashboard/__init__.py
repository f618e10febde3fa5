"""The dashboard: one live page, a client of the public API.

Nothing of it is loaded before the first browser asks for a page: the page's library costs over 30 MB and half a second,
which a controller that nobody looks at should not pay.
"""

from controller.dashboard.mounting import mount_dashboard

__all__ = ["mount_dashboard"]
