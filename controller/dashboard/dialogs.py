"""What an operator does beyond looking: sign in, submit an SLA, add an agent, confirm."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from html import escape
from typing import Any

from nicegui import ui
from pydantic import ValidationError

from controller.dashboard.api import Answer, Api
from controller.dashboard.elements import LiveHtml, box, button, enable
from controller.dashboard.plan_picture import plan_picture
from controller.views import Admission, AgentOut, SlaOut, TokenOut
from sla.errors import RetryableError

Call = Callable[[], Awaitable[Answer]]

EXAMPLE_SLA = {
    "service_id": "document-reader",
    "latency_p99_ms": 4000,
    "throughput_rps": 0.8,
    "availability_sla": "99%",
}


async def perform(call: Call, done: str) -> Answer | None:
    """Make a call and say how it went; None when there was no answer."""
    try:
        answer = await call()
    except RetryableError as error:
        ui.notify(str(error), type="negative")
        return None
    if answer.ok:
        ui.notify(done, type="positive")
    else:
        ui.notify(answer.sentence, type="negative", multi_line=True)
    return answer


async def confirm(title: str, sentence: str, verb: str) -> bool:
    """True if the operator agrees."""
    with ui.dialog() as dialog, box("div", "tg-card tg-dialog"):
        LiveHtml("h2", text=escape(title))
        LiveHtml("p", text=escape(sentence))
        with box("div", "tg-row tg-end"):
            button("Cancel", lambda: dialog.submit(False), "tg-quiet")
            button(escape(verb), lambda: dialog.submit(True), "tg-primary")
    agreed = bool(await dialog)
    dialog.delete()
    return agreed


def problem_html(answer: Answer) -> str:
    """Why the API refused: the field, if it is about one, and the sentence."""
    pointer = f"<code>{escape(answer.pointer)}</code> " if answer.pointer else ""
    return f'<div class="tg-note tg-note-bad" role="alert">{pointer}{escape(answer.sentence)}</div>'


class SlaDialog:
    """Edit a contract, see whether it can be kept, apply it."""

    def __init__(self, api: Api, agents: Callable[[], list[AgentOut]], sla: SlaOut | None = None) -> None:
        self._api = api
        self._agents = agents
        self._version = sla.version if sla else None
        document = _editable(sla.contract) if sla else EXAMPLE_SLA
        with ui.dialog().props("no-backdrop-dismiss") as self._dialog, box("div", "tg-card tg-dialog tg-wide tg-wider"):
            LiveHtml("h2", text=f"Edit SLA {escape(sla.service_id)}" if sla else "Submit an SLA")
            LiveHtml("p", "tg-muted", text="What the service must deliver. The preview moves nothing.")
            self._text = (
                ui.textarea(value=json.dumps(document, indent=2), on_change=self._edited)
                .props('outlined autogrow spellcheck=false input-class="tg-code" aria-label="SLA as JSON"')
                .classes("tg-editor")
            )
            self._result = LiveHtml("div", "tg-result")
            with box("div", "tg-row tg-end"):
                button("Close", self._close, "tg-quiet")
                self._preview_button = button("Preview", self._preview)
                self._apply_button = button("Apply", self._apply, "tg-primary")
        enable(self._apply_button, False)

    def open(self) -> None:
        """Show it."""
        self._dialog.open()

    def _close(self) -> None:
        self._dialog.close()
        self._dialog.delete()

    def _edited(self) -> None:
        enable(self._apply_button, False)

    def _body(self) -> bytes:
        return str(self._text.value or "").encode()

    async def _preview(self) -> None:
        body = self._body()
        answer = await self._ask("/v1/slas:preview", body)
        if answer is None or not answer.ok:
            return
        try:
            admission = Admission.model_validate(answer.document)
        except ValidationError:
            self._result.show(problem_html(answer))
            return
        self._result.show(_admission_html(admission, self._agents()))
        enable(self._apply_button, body == self._body())

    async def _apply(self) -> None:
        headers = {"If-Match": f'"{self._version}"'} if self._version is not None else None
        answer = await self._ask("/v1/slas", self._body(), headers)
        if answer is not None and answer.ok:
            ui.notify("The SLA is stored; the controller acts on it.", type="positive")
            self._close()

    async def _ask(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer | None:
        try:
            answer = await self._api.post(path, body=body, headers=headers)
        except RetryableError as error:
            self._result.show(f'<div class="tg-note tg-note-bad" role="alert">{escape(str(error))}</div>')
            return None
        if not answer.ok:
            self._result.show(problem_html(answer))
        return answer


def _editable(contract: dict[str, Any]) -> dict[str, Any]:
    """A stored contract as a person would write it: what was left out stays out, 4000.0 reads 4000."""
    said = {name: value for name, value in contract.items() if value not in (None, "", [], ())}
    return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in said.items()}


def _admission_html(admission: Admission, agents: list[AgentOut]) -> str:
    tone = {"admissible": "ok", "infeasible": "bad"}.get(admission.verdict, "warn")
    picture = plan_picture(admission.shards, agents)
    return f'<div class="tg-note tg-note-{tone}">{escape(admission.text)}</div>' + (
        f'<div class="tg-scroll">{picture}</div>' if picture else ""
    )


class TokenDialog:
    """Make a join token and show the command for the device."""

    def __init__(self, api: Api) -> None:
        self._api = api
        with ui.dialog() as self._dialog, box("div", "tg-card tg-dialog tg-wide"):
            LiveHtml("h2", text="Add an agent")
            self._hint = LiveHtml(
                "p", text="A join token lets one device enroll within the next hour. Its command is shown once, here."
            )
            self._result = LiveHtml("div", "tg-result")
            with box("div", "tg-row tg-end"):
                button("Close", self._close, "tg-quiet")
                self._copy_button = button("Copy command", self._copy)
                self._make_button = button("Create token", self._make, "tg-primary")
        self._copy_button.set_visibility(False)
        self._command = ""

    def open(self) -> None:
        """Show it."""
        self._dialog.open()

    def _close(self) -> None:
        self._dialog.close()
        self._dialog.delete()

    async def _make(self) -> None:
        try:
            answer = await self._api.post("/v1/tokens", json={"uses": 1, "note": "dashboard"})
        except RetryableError as error:
            self._result.show(f'<div class="tg-note tg-note-bad" role="alert">{escape(str(error))}</div>')
            return
        if not answer.ok:
            self._result.show(problem_html(answer))
            return
        self._command = TokenOut.model_validate(answer.document).command
        self._hint.show("Run this on the device; add <code>--platform NAME</code> for anything but x86:")
        self._result.show(f'<pre class="tg-command">{escape(self._command)}</pre>')
        self._copy_button.set_visibility(True)
        self._make_button.set_visibility(False)

    def _copy(self) -> None:
        ui.clipboard.write(self._command)
        ui.notify("Copied.", type="positive")


def sign_in_form(try_key: Callable[[str], Awaitable[str | None]]) -> None:
    """A form that asks for an API key; `try_key` answers why it was not taken, or None after it was."""
    with box("div", "tg-card tg-sign-in"):
        LiveHtml("h2", text="Sign in")
        LiveHtml(
            "p", "tg-muted", text="This Tidegate asks for an API key. It stays on the controller, for this session."
        )
        entry = (
            ui.input("API key", password=True)
            .props("outlined autofocus autocomplete=current-password")
            .classes("tg-key-entry")
        )
        problem = LiveHtml("div")

        async def submit() -> None:
            reason = await try_key(str(entry.value or "").strip())
            if reason is not None:
                problem.show(f'<div class="tg-note tg-note-bad" role="alert">{escape(reason)}</div>')

        entry.on("keydown.enter", submit, [])
        with box("div", "tg-row tg-end"):
            button("Sign in", submit, "tg-primary")


def theme_button() -> Any:
    """Switches between dark and light; at first the page follows the system."""
    dark = ui.dark_mode(None)

    async def switch() -> None:
        if dark.value is None:
            dark.value = not await ui.run_javascript("window.matchMedia('(prefers-color-scheme: dark)').matches")
        else:
            dark.value = not dark.value

    return button("◐", switch, "tg-quiet tg-icon", hint="dark or light")
