"""How strongly tokens and cache entries are pruned, following the use of the memory bandwidth. Pure."""

from __future__ import annotations

import math

MIN_STRENGTH = 0.05
MAX_STRENGTH = 0.7
"""At most this share may be dropped, whatever the bandwidth says."""
_BUSY, _BUSY_FACTOR = 0.85, 0.6
_IDLE, _IDLE_FACTOR = 0.3, 1.3


def next_strength(strength: float, bandwidth_use: float) -> float:
    """The share to drop from now on, given the share dropped so far and the use of the memory bandwidth in [0, 1].

    Above 0.85 it is multiplied by 0.6, below 0.3 by 1.3, else unchanged, as printed in the source article. (That prunes less where
    bandwidth is scarce: choosing and gathering entries costs bandwidth itself. Implausible or not, it is kept as printed.) A use that is not
    a number changes nothing.
    """
    factor = 1.0
    if math.isfinite(bandwidth_use):
        factor = _BUSY_FACTOR if bandwidth_use > _BUSY else _IDLE_FACTOR if bandwidth_use < _IDLE else 1.0
    return min(MAX_STRENGTH, max(MIN_STRENGTH, strength * factor))


def keep_ratio(strength: float) -> float:
    """Share that is kept."""
    return 1.0 - min(MAX_STRENGTH, max(0.0, strength))
