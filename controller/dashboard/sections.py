"""The page's live sections. Each is given the whole state and sends to the browser only what changed."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from controller.dashboard import agent_cells
from controller.dashboard.api import Api
from controller.dashboard.dialogs import SlaDialog, TokenDialog, confirm, perform
from controller.dashboard.elements import LiveHtml, box, button, show_if
from controller.dashboard.feed import FeedState, Reading
from controller.dashboard.fragments import decision_list, event_list, plan_head, sla_body, sla_head
from controller.dashboard.llm_section import LlmSection
from controller.dashboard.plan_picture import agent_colours, plan_picture
from controller.views import AgentOut, PlanOut, SlaOut

MAX_AGENTS_SHOWN = 100


class ServiceSection:
    """One SLA with its running plan."""

    def __init__(self, sla: SlaOut, api: Api, agents: Callable[[], list[AgentOut]]) -> None:
        self._api = api
        self._agents = agents
        self._sla = sla
        self._drawn: object = None
        self.element = box("section", "tg-card tg-service")
        self.element.props["data-service"] = sla.service_id
        with self.element:
            with box("div", "tg-card-head"):
                self._head = LiveHtml("div", "tg-title")
                with box("div", "tg-row"):
                    button("Edit", self._edit, "tg-quiet")
                    self._pin = button(
                        "Pin plan", self._pin_plan, "tg-quiet", hint="only the loss of a device moves a pinned plan"
                    )
                    self._unpin = button("Unpin", self._unpin_plan, "tg-quiet")
                    self._rollback = button(
                        "Roll back", self._roll_back, "tg-quiet", hint="to the last plan that ran well"
                    )
            self._body = LiveHtml("div")
            self._plan = LiveHtml("div", "tg-plan-head")
            self._picture = LiveHtml("div", "tg-scroll")

    def show(self, sla: SlaOut, plan: PlanOut | None) -> None:
        """Show the newest state."""
        self._sla = sla
        self._head.show(sla_head(sla))
        self._body.show(sla_body(sla))
        show_if(self._pin, plan is not None and not sla.pinned)
        show_if(self._unpin, sla.pinned)
        show_if(self._rollback, plan is not None)
        self._plan.show('<span class="tg-muted">No plan is running.</span>' if plan is None else plan_head(plan))
        agents = self._agents()
        # What the picture shows, and nothing that changes with each report.
        seen = (plan.shards if plan else None, [(a.id, a.platform, a.evidence, a.is_cloud) for a in agents])
        if seen != self._drawn:
            self._drawn = seen
            self._picture.show(plan_picture(plan.shards, agents) if plan else "")

    def _edit(self) -> None:
        SlaDialog(self._api, self._agents, self._sla).open()

    async def _pin_plan(self) -> None:
        name = self._sla.service_id
        if await confirm(
            f"Pin the plan of {name}?", "It stays as it is, until it is unpinned or a device is lost.", "Pin"
        ):
            await perform(lambda: self._api.post(f"/v1/plans/{name}:pin"), "The plan is pinned.")

    async def _unpin_plan(self) -> None:
        name = self._sla.service_id
        if await confirm(f"Unpin the plan of {name}?", "The controller may move shards again.", "Unpin"):
            await perform(lambda: self._api.post(f"/v1/plans/{name}:unpin"), "The plan is unpinned.")

    async def _roll_back(self) -> None:
        name = self._sla.service_id
        sentence = "The last plan that ran well before this one is rolled out and pinned."
        if await confirm(f"Roll back {name}?", sentence, "Roll back"):
            await perform(lambda: self._api.post(f"/v1/plans/{name}:rollback"), "The earlier plan is being rolled out.")


class Services:
    """All SLAs, and what to do when there is none."""

    def __init__(self, api: Api, command: str) -> None:
        self._api = api
        self._sections: dict[str, ServiceSection] = {}
        self._agents: list[AgentOut] = []
        with box("div", "tg-section-head"):
            LiveHtml("h1", text="Services")
            button("Submit SLA", self._submit, "tg-primary")
        self._list = box("div", "tg-stack")
        self._empty = LiveHtml(
            "div", "tg-card tg-empty",
            text=f"<b>No SLA yet.</b> Submit one above, or run:<pre class='tg-command'>{escape(command)}</pre>",
        )  # fmt: skip
        self._empty.element.set_visibility(False)

    def show(self, reading: Reading) -> None:
        """Show the newest state."""
        self._agents = reading.agents
        slas = {sla.service_id: sla for sla in reading.slas}
        for name in self._sections.keys() - slas.keys():
            self._sections.pop(name).element.delete()
        for name, sla in slas.items():
            if name not in self._sections:
                with self._list:
                    self._sections[name] = ServiceSection(sla, self._api, lambda: self._agents)
            self._sections[name].show(sla, reading.running.get(name))
        show_if(self._empty.element, not slas)

    def _submit(self) -> None:
        SlaDialog(self._api, lambda: self._agents).open()


class AgentRow:
    """One agent; every cell is sent for itself."""

    def __init__(self, agent: AgentOut, api: Api) -> None:
        self._api = api
        self._id = agent.id
        self.element = box("tr")
        self.element.props["data-agent"] = agent.id
        with self.element:
            self._cells = [LiveHtml("td") for _ in agent_cells.COLUMNS]
            for cell, label in zip(self._cells, agent_cells.COLUMNS, strict=True):
                cell.element.props["data-label"] = label
            with box("td", "tg-actions"):
                self._drain = button("Drain", self._drain_agent, "tg-quiet")

    def show(self, agent: AgentOut, colour: str, late_s: float) -> None:
        """Show the newest report."""
        for cell, text in zip(self._cells, agent_cells.cells(agent, colour, late_s), strict=True):
            cell.show(text)
        self.element.classes(**{"add" if agent.state == "lost" else "remove": "tg-gone"})
        show_if(self._drain, agent.state in ("live", "suspect"))

    async def _drain_agent(self) -> None:
        sentence = "Its shards move to other agents and it gets no new ones."
        if await confirm(f"Drain {self._id}?", sentence, "Drain"):
            await perform(lambda: self._api.post(f"/v1/agents/{self._id}:drain"), f"{self._id} is draining.")


class Agents:
    """The fleet."""

    def __init__(self, api: Api, command: str) -> None:
        self._api = api
        self._rows: dict[str, AgentRow] = {}
        with box("div", "tg-section-head"):
            LiveHtml("h1", text="Agents")
            button("Add agent", lambda: TokenDialog(api).open(), "tg-primary")
        self._card = box("div", "tg-card tg-scroll")
        with self._card, box("table", "tg-agents"):
            LiveHtml(
                "thead", text="<tr>" + "".join(f"<th>{name}</th>" for name in agent_cells.COLUMNS) + "<th></th></tr>"
            )
            self._body: Any = box("tbody")
        self._more = LiveHtml("p", "tg-muted")
        self._empty = LiveHtml(
            "div", "tg-card tg-empty",
            text="<b>No agents yet.</b> Add one above, or run this and then, on the device, the command that it prints:"
            f"<pre class='tg-command'>{escape(command)}</pre>",
        )  # fmt: skip
        self._empty.element.set_visibility(False)

    def show(self, reading: Reading, late_s: float) -> None:
        """Show the newest reports."""
        colours = agent_colours(reading.agents)
        agents = {agent.id: agent for agent in reading.agents[:MAX_AGENTS_SHOWN]}
        for name in self._rows.keys() - agents.keys():
            self._rows.pop(name).element.delete()
        for name, agent in agents.items():
            if name not in self._rows:
                with self._body:
                    self._rows[name] = AgentRow(agent, self._api)
            self._rows[name].show(agent, colours[name], late_s)
        hidden = len(reading.agents) - len(agents)
        self._more.show(f"and {hidden} more; tidegate agent list shows all" if hidden else "")
        show_if(self._card, bool(agents))
        show_if(self._empty.element, not agents)


class History:
    """Decisions and events."""

    def __init__(self) -> None:
        with box("div", "tg-columns"):
            with box("section"):
                with box("div", "tg-section-head"):
                    LiveHtml("h1", text="Decisions <small>UTC</small>")
                self._decisions = LiveHtml("div", "tg-card")
            with box("section"):
                with box("div", "tg-section-head"):
                    LiveHtml("h1", text="Events <small>UTC</small>")
                self._events = LiveHtml("div", "tg-card")

    def show(self, reading: Reading) -> None:
        """Show the newest ones."""
        self._decisions.show(decision_list(reading.decisions))
        self._events.show(event_list(reading.events))


class LivePage:
    """All sections of one browser's page."""

    def __init__(self, api: Api, url: str, cli: str) -> None:
        self._hint = LiveHtml("div", "tg-card tg-empty", text=f"Reading from {escape(url)} …")
        self._content = box("div", "tg-stack tg-all")
        with self._content:
            self._services = Services(api, f"{cli} sla apply sla/examples/document-reader.json")
            self._agents = Agents(api, f"{cli} token create")
            self._llm = LlmSection(api)
            self._history = History()
        self._content.set_visibility(False)
        self._shown: Reading | None = None

    def show(self, state: FeedState) -> None:
        """Show a state; a stale one is dimmed."""
        reading = state.reading
        show_if(self._hint.element, reading is None)
        show_if(self._content, reading is not None)
        if reading is None:
            return
        if reading is not self._shown:
            self._shown = reading
            self._services.show(reading)
            self._history.show(reading)
            self._llm.show(reading.llm, reading.advices, reading.intents)
        self._agents.show(reading, state.age_s if state.error else 0.0)
        self._content.classes(**{"add" if state.error else "remove": "tg-stale"})
