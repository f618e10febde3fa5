"""The options and commands about the LLM and about intents, for the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from agents.options import whole_number

Call = Callable[[str, str], Callable[[argparse.Namespace], int]]


def add_llm_options(parser: argparse.ArgumentParser) -> None:
    """How the controller uses the model."""
    parser.add_argument(
        "--llm-mode",
        choices=("off", "shadow", "advise", "control"),
        default="shadow",
        help="shadow: asked and recorded, never acts (default); advise: a person confirms; control: the gate is enough",
    )
    parser.add_argument("--llm-tokens-per-hour", type=whole_number(0), default=200_000, metavar="N")
    parser.add_argument(
        "--llm-deadline", type=whole_number(1), default=10, metavar="SECONDS", help="the loop never waits for it"
    )
    parser.add_argument(
        "--llm-candidates", type=whole_number(1), default=8, help="plans that it is shown; fewer for a small model"
    )
    parser.add_argument("--llm-price", type=float, default=0.0, help="of a million tokens, for the report")


def add_llm_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    """`tidegate llm ...` and `tidegate intent ...`; `call` finds the function that runs one."""
    llm = commands.add_parser("llm", help="the LLM beside the solver")
    actions = llm.add_subparsers(required=True, metavar="ACTION")
    report = actions.add_parser("report", help="choices, effects, win rate, regret, refusals, tokens, seconds")
    report.add_argument("service", nargs="?")
    advice = actions.add_parser("advice", help="what it advises and waits for you to accept (mode advise)")
    for name in ("accept", "dismiss"):
        action = actions.add_parser(name, help=f"{name} an advice")
        action.add_argument("id")
        action.set_defaults(run=call(f"llm_{name}", "llm_commands"))
    for action, name in ((report, "report"), (advice, "advice")):
        action.add_argument("--json", action="store_true")
        action.set_defaults(run=call(f"llm_{name}", "llm_commands"))

    intent = commands.add_parser("intent", help="what operators want for a while")
    intents = intent.add_subparsers(required=True, metavar="ACTION")
    add = intents.add_parser("add", help="say it; it is shown back in plain words and acts once confirmed")
    add.add_argument("service")
    add.add_argument("text", nargs="?", default="", help="a sentence, which the LLM reads; or use the options")
    add.add_argument("--avoid", action="append", default=[], metavar="AGENT or zone:ZONE")
    add.add_argument("--prefer", action="append", default=[], metavar="AGENT or zone:ZONE")
    add.add_argument(
        "--only", action="append", default=[], metavar="STAGE=MODEL[,MODEL]", help="bound a stage's variants"
    )
    add.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="STAGE.KNOB=LOW..HIGH",
        help="keep a knob of the service between two values",
    )
    add.add_argument(
        "--weigh", action="append", default=[], metavar="PART=FACTOR",
        help="risk, jitter or saturation counts 0.5 to 1.5 times what it counts otherwise",
    )  # fmt: skip
    add.add_argument("--keep", action="store_true", help="move nothing unless a device is lost")
    add.add_argument("--minutes", type=whole_number(1), default=60, help="how long, at most 1440 (default 60)")
    add.add_argument("--starts-in", type=whole_number(0), default=0, metavar="MINUTES")
    add.add_argument("--yes", action="store_true", help="confirm at once what was understood")
    listing = intents.add_parser("list", help="proposed, in force, ended")
    listing.add_argument("service", nargs="?")
    for action, name in ((add, "add"), (listing, "list")):
        action.add_argument("--json", action="store_true")
        action.set_defaults(run=call(f"intent_{name}", "llm_commands"))
    for name, text in (("confirm", "put a proposal in force"), ("revoke", "take it back")):
        action = intents.add_parser(name, help=text)
        action.add_argument("id")
        action.set_defaults(run=call(f"intent_{name}", "llm_commands"))
