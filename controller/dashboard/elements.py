"""The few elements that the page is made of: thin names over the library, with our own look (style.css)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui


class LiveHtml:
    """A piece of HTML that is sent again only when it changed. The text must be escaped already."""

    def __init__(self, tag: str, css: str = "", *, text: str = "") -> None:
        self.element = ui.html(text, sanitize=False, tag=tag).classes(css)
        self._text = text

    def show(self, text: str) -> None:
        """Show `text`, which does nothing if it is shown already."""
        if text != self._text:
            self._text = text
            self.element.set_content(text)


def box(tag: str = "div", css: str = "") -> Any:
    """An element to put others into."""
    return ui.element(tag).classes(css)


def button(text: str, on_click: Callable[..., Any], css: str = "", *, hint: str = "") -> Any:
    """A plain button; `hint` is its title."""
    made = LiveHtml("button", f"tg-button {css}", text=text).element
    made.props["type"] = "button"
    if hint:
        made.props["title"] = hint
    return made.on("click", on_click, [])


def enable(button: Any, enabled: bool) -> None:
    """Let a button be pressed, or not."""
    if button.props.get("disabled", False) == enabled:
        button.props["disabled"] = not enabled
        button.update()


def show_if(element: Any, shown: bool) -> None:
    """Show or hide an element."""
    if element.visible != shown:
        element.set_visibility(shown)
