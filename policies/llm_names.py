"""Short names that stand for identifiers in a prompt, and the way back.

No string that a device or a user chose enters a prompt raw; and an answer may only speak of what its prompt named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from policies.ids import AgentId, ModelName, ServiceId, StageName
from policies.knobs import knobs_of
from policies.snapshot import Snapshot

_Name = TypeVar("_Name", bound=str)


class Aliases:
    """Identifier -> short name."""

    def __init__(self, snapshot: Snapshot, service_id: ServiceId) -> None:
        spec = snapshot.services[service_id].spec
        models = dict.fromkeys(model for stage in spec.onnx_stages() for model in stage.variants)
        self.agents: dict[AgentId, str] = _numbered("A", sorted(snapshot.fleet.agents))
        self.models: dict[ModelName, str] = _numbered("M", models)
        self.stages: dict[StageName, str] = _numbered("S", (stage.name for stage in spec.onnx_stages()))
        self.knobs: dict[str, str] = _numbered("K", (key for key, _, _ in knobs_of(spec)))
        self.zones: dict[str, str] = _numbered("Z", sorted({a.zone for a in snapshot.fleet.agents.values()}))

    def named(self, shown: Iterable[AgentId]) -> Named:
        """What a prompt that shows these agents has named."""
        return Named(
            agents={self.agents[agent]: agent for agent in shown},
            models={alias: model for model, alias in self.models.items()},
            stages={alias: stage for stage, alias in self.stages.items()},
            zones={alias: zone for zone, alias in self.zones.items()},
            knobs={alias: knob for knob, alias in self.knobs.items()},
        )

    def hide(self, text: str) -> str:
        """Free text in which the names that people use for agents, zones, stages and models are replaced by the short ones."""
        known: dict[str, str] = {}
        for names in (self.models, self.stages, self.zones, self.agents, self.knobs):
            known.update({_plain(name): alias for name, alias in names.items() if _plain(name)})
        if not known:
            return text
        # The longest first, and whole words only: `site-b` is also meant by "Site B".
        ways = sorted(known, key=len, reverse=True)
        pattern = "|".join(r"[-_. ]?".join(re.escape(part) for part in way.split()) for way in ways)
        return re.sub(
            rf"(?i)(?<![\w-])(?:{pattern})(?![\w-])", lambda found: known.get(_plain(found.group()), ""), text
        )


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """Short name -> identifier, for what a prompt named."""

    agents: dict[str, AgentId] = {}
    models: dict[str, ModelName] = {}
    stages: dict[str, StageName] = {}
    zones: dict[str, str] = {}
    knobs: dict[str, str] = {}


def fenced(text: str, most: int) -> str:
    """An operator's free text as data: one line, bounded, with nothing in it that could end its fence; empty if nothing is left."""
    clean = re.sub(r"[\x00-\x1f\x7f<>`{}\u2028\u2029]+", " ", text)[:most]
    clean = redacted(re.sub(r"\s+", " ", clean).strip())
    return f"<intent>\n{clean}\n</intent>" if clean else ""


_SECRETS = (
    (re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+"), "[mail]"),
    (re.compile(r"(?i)\b[a-z][a-z0-9+.-]{1,15}://[^\s\"']{1,500}"), "[address]"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b"), "[address]"),
    (re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b"), "[address]"),
    (re.compile(r"(?i)\b(?:bearer|token|password|passwd|secret|api[-_ ]?key|key)\b\s*[:=]?\s*[\w./+=-]{6,}"), "[secret]"),
    (re.compile(r"\b(?:sk|pk|ghp|xox[a-z])[-_][\w-]{8,}"), "[secret]"),
    (re.compile(r"\b(?=[A-Za-z0-9+/_-]*\d)(?=[A-Za-z0-9+/_-]*[A-Za-z])[A-Za-z0-9+/_-]{32,}={0,2}"), "[secret]"),
    (re.compile(r"(?<![\w.])\+?\d[\d ()/-]{8,18}\d(?!\w|\.\d)"), "[number]"),
)  # fmt: skip


def redacted(text: str) -> str:
    """Text without mail addresses, network addresses, keys and telephone numbers."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


def _plain(name: str) -> str:
    return " ".join(re.split(r"[-_. ]+", name.strip().lower()))


def _numbered(letter: str, names: Iterable[_Name]) -> dict[_Name, str]:
    return {name: f"{letter}{at}" for at, name in enumerate(names, start=1)}
