"""The command line. Heavy imports happen inside the command that needs them, so that an agent needs only its own few."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from agents.options import add_options, whole_number
from controller.llm_options import add_llm_commands, add_llm_options
from controller.model_options import add_model_commands
from sla.errors import TidegateError

DEFAULT_URL = "http://127.0.0.1:8080"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 done, 1 a promise did not hold, 2 one sentence on stderr says what is wrong."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except TidegateError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"tidegate: this needs {error.name}; install it with: pip install 'tidegate[controller]'", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = argparse.ArgumentParser(
        prog="tidegate",
        description="Keeps the latency promises of multimodal inference spread over edge NPUs and the cloud.",
    )
    parser.add_argument(
        "--url", default=os.environ.get("TIDEGATE_URL", DEFAULT_URL), help="the controller (TIDEGATE_URL)"
    )
    parser.add_argument(
        "--key", default=os.environ.get("TIDEGATE_KEY"), help="API key (TIDEGATE_KEY); not needed on loopback"
    )
    parser.add_argument(
        "--ca-file", default=os.environ.get("TIDEGATE_CA_FILE"), help="CA certificate of the controller, for https"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _stack_commands(commands)
    _agent_commands(commands)
    _key_commands(commands)
    _sla_commands(commands)
    add_model_commands(commands, _call)
    _plan_commands(commands)
    _what_if_commands(commands)
    add_llm_commands(commands, _call)
    return parser


def _stack_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser("demo", help="run the main job on this machine, and report what held")
    _stack_options(demo)
    demo.add_argument("--seconds", type=whole_number(10), default=60, help="how long requests are sent (default 60)")
    demo.add_argument("--report", metavar="FILE.json", help="write the report there")
    demo.add_argument("--keep", action="store_true", help="leave everything running afterwards, until Ctrl-C")
    demo.set_defaults(run=_demo)

    up = commands.add_parser("up", help="the same stack without the script, left running")
    _stack_options(up)
    up.set_defaults(run=_up)

    controller = commands.add_parser("controller", help="the controller alone (production)")
    controller.add_argument("--host", default="127.0.0.1", help="HTTPS and API keys unless this is loopback")
    controller.add_argument("--port", type=_port, default=8080, help="dashboard, API and inference")
    controller.add_argument("--agent-port", type=_port, default=7443, help="agents dial this")
    controller.add_argument("--advertise", help="name or address that agents should dial")
    controller.add_argument("--dir", default=state_dir(), help="state that must survive")
    controller.add_argument("--cache", default=cache_dir(), help="downloaded packages (TIDEGATE_CACHE)")
    controller.add_argument("--store", help="redis:// address; default: an embedded Valkey in --dir")
    controller.add_argument("--ray", default="local", help="local, none, or the address of a Ray cluster")
    controller.add_argument(
        "--llm-base-url", help="any OpenAI-compatible endpoint; without it the solver decides alone"
    )
    controller.add_argument("--llm-model", default="default")
    add_llm_options(controller)
    controller.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING"))
    controller.set_defaults(run=_controller)


def _stack_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", help="state directory (default: a new temporary one)")
    parser.add_argument("--cache", default=cache_dir(), help="downloaded packages (TIDEGATE_CACHE)")
    parser.add_argument("--port", type=_port, default=8080, help="dashboard and API")
    parser.add_argument("--agent-port", type=_port, default=7443, help="agents dial this")
    parser.add_argument("--ray", default="local", help="local, none, or the address of a Ray cluster")
    parser.add_argument("--llm-base-url", help="any OpenAI-compatible endpoint; without it the solver decides alone")
    parser.add_argument("--llm-model", default="default")
    parser.add_argument(
        "--llm",
        choices=("local",),
        help="local: a small model on this machine (extra local-llm), instead of an endpoint",
    )
    add_llm_options(parser)


def _agent_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    agent = commands.add_parser("agent", help="enroll this device, or look after enrolled ones")
    actions = agent.add_subparsers(required=True, metavar="ACTION")
    join = actions.add_parser("join", help="enroll this device and serve")
    add_options(join, positional=True)
    join.set_defaults(run=_agent_join)
    listing = actions.add_parser("list", help="enrolled agents")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=_call("agent_list"))
    drain = actions.add_parser("drain", help="move an agent's shards elsewhere")
    drain.add_argument("id")
    drain.set_defaults(run=_call("agent_drain"))
    undrain = actions.add_parser("undrain", help="let a drained agent have work again")
    undrain.add_argument("id")
    undrain.set_defaults(run=_call("agent_undrain"))
    remove = actions.add_parser("remove", help="revoke an agent's identity")
    remove.add_argument("id")
    remove.set_defaults(run=_call("agent_remove"))

    token_command = commands.add_parser("token", help="join tokens")
    token_actions = token_command.add_subparsers(required=True, metavar="ACTION")
    create = token_actions.add_parser("create", help="make one; it is shown once")
    create.add_argument("--uses", type=whole_number(1), default=1)
    create.add_argument("--ttl", type=whole_number(1), default=3600, metavar="SECONDS")
    create.add_argument("--note", default="")
    create.add_argument("--json", action="store_true")
    create.set_defaults(run=_call("token_create"))


def _key_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    key = commands.add_parser("key", help="API keys with roles, for a controller that others reach")
    actions = key.add_subparsers(required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make one; it is shown once")
    create.add_argument("--role", choices=("viewer", "operator", "admin"), default="viewer")
    create.add_argument("--note", default="")
    create.add_argument("--json", action="store_true")
    create.set_defaults(run=_call("key_create"))
    listing = actions.add_parser("list", help="keys that were made")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=_call("key_list"))
    revoke = actions.add_parser("revoke", help="take a key back")
    revoke.add_argument("id")
    revoke.set_defaults(run=_call("key_revoke"))


def _sla_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sla = commands.add_parser("sla", help="contracts")
    actions = sla.add_subparsers(required=True, metavar="ACTION")
    for name, text in (
        ("apply", "submit a contract"),
        ("preview", "could it be kept? changes nothing"),
        ("validate", "check a file without a controller"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("file", metavar="FILE")
        action.add_argument("--json", action="store_true")
        if name == "apply":
            action.add_argument("--if-version", type=int, help="refuse if somebody changed it since this version")
        action.set_defaults(run=_call("sla_preview", "sla_commands") if name == "preview" else _call(f"sla_{name}"))
    status = actions.add_parser("status", help="what is promised and what is kept")
    status.add_argument("id", nargs="?")
    status.add_argument("--json", action="store_true")
    status.set_defaults(run=_call("sla_status", "sla_commands"))
    delete = actions.add_parser("delete", help="withdraw a contract")
    delete.add_argument("id")
    delete.set_defaults(run=_call("sla_delete"))
    report = actions.add_parser("report", help="one month of a contract, to send to a customer")
    report.add_argument("id")
    report.add_argument("--month", metavar="YYYY-MM", help="UTC (default: the running one)")
    report.add_argument("--format", choices=("html", "json"), default="html")
    report.add_argument("--output", metavar="FILE", help="write it there instead of printing it")
    report.set_defaults(run=_call("sla_report", "sla_commands"))
    export = actions.add_parser("export", help="a contract as a document again")
    export.add_argument("id")
    export.add_argument("--openslo", action="store_true", help="as OpenSLO v1 (YAML) instead of Tidegate's JSON")
    export.set_defaults(run=_call("sla_export", "sla_commands"))
    bring = actions.add_parser("import", help="turn OpenSLO v1 (YAML) into a contract; prints it, or submits it")
    bring.add_argument("file", metavar="FILE.yaml")
    bring.add_argument("--service", help="which service, if the file speaks of several")
    bring.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=JSON",
        help="a field of the contract, e.g. throughput_rps=20",
    )
    bring.add_argument("--apply", action="store_true", help="submit it to the controller")
    bring.set_defaults(run=_call("sla_import", "sla_commands"))


def _plan_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = commands.add_parser("plan", help="running plans")
    actions = plan.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="where the shards are")
    show.add_argument("service", nargs="?")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=_call("plan_show"))
    apply = actions.add_parser(
        "apply", help="make a plan of your own run (edit what plan show --json prints), and pin it"
    )
    apply.add_argument("file", metavar="FILE")
    apply.add_argument("--service", help="whose plan, where the file does not say it or speaks of several")
    apply.add_argument(
        "--preview", action="store_true", help="only say what it would do; exit status 1 if it is refused"
    )
    apply.add_argument("--rps", type=float, help="with --preview: at this load")
    apply.add_argument("--json", action="store_true")
    apply.set_defaults(run=_call("plan_apply", "plan_commands"))
    for name, text in (
        ("rollback", "back to the last good plan"),
        ("pin", "keep the running plan"),
        ("unpin", "let the loop decide again"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("service")
        action.set_defaults(run=_call(f"plan_{name}"))
    explain = commands.add_parser("explain", help="the last decisions about a service, with their reasons")
    explain.add_argument("service", nargs="?")
    explain.add_argument("--limit", type=whole_number(1), default=10)
    explain.add_argument("--json", action="store_true")
    explain.set_defaults(run=_call("explain"))


def _what_if_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser("simulate", help="play a scenario under several policies; needs no controller")
    simulate.add_argument("scenario", nargs="?", metavar="SCENARIO.toml", help="a file, or the name of a built-in one")
    simulate.add_argument("--list", action="store_true", help="the built-in scenarios")
    simulate.add_argument("--policy", default="solver,static", metavar="A,B", help="which policies, or: all")
    simulate.add_argument("--seconds", type=float, help="play so much of it (default: as the scenario says)")
    simulate.add_argument(
        "--agents",
        type=whole_number(1),
        metavar="N",
        help="so many zones of the scenario that they have N agents together",
    )
    simulate.add_argument("--seed", type=whole_number(0), default=1)
    simulate.add_argument("--traces", metavar="DIR", help="recorded traces (TIDEGATE_TRACES); made up without them")
    simulate.add_argument("--svg", metavar="FILE", help="draw it there, as an SVG")
    simulate.add_argument("--png", metavar="FILE", help="draw it there, as a PNG")
    simulate.add_argument("--json", action="store_true")
    simulate.set_defaults(run=_call("run_simulate", "simulate_cli"))
    replay = commands.add_parser("replay", help="make recorded decisions again, and lay another policy beside them")
    replay.add_argument("log", nargs="?", metavar="LOG", help="a file that --save wrote (default: ask the controller)")
    replay.add_argument("--service", help="whose decisions to ask the controller for")
    replay.add_argument("--limit", type=whole_number(1), default=50)
    replay.add_argument("--save", metavar="FILE", help="keep the log there")
    replay.add_argument("--policy", help="also: what this policy would have done (solver or a baseline)")
    replay.add_argument("--html", metavar="FILE", help="write both side by side")
    replay.add_argument("--json", action="store_true")
    replay.set_defaults(run=_call("run_replay", "replay_cli"))


def _call(name: str, module: str = "commands") -> Callable[[argparse.Namespace], int]:
    """The function of that name in `controller.commands` or another module of commands, imported when it is called."""

    def run(arguments: argparse.Namespace) -> int:
        from controller import commands

        try:
            return int(getattr(importlib.import_module(f"controller.{module}"), name)(arguments) or 0)
        finally:
            commands.close(arguments)

    return run


def _agent_join(arguments: argparse.Namespace) -> int:
    from agents.agent import run_until_it_leaves
    from agents.settings import settings_from

    return run_until_it_leaves(lambda: settings_from(arguments))


def _controller(arguments: argparse.Namespace) -> int:
    from controller.serve import run_controller

    return run_controller(arguments)


def _up(arguments: argparse.Namespace) -> int:
    from controller.local.up import run_up

    return run_up(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from controller.local.demo import run_demo

    return run_demo(arguments)


def _port(text: str) -> int:
    value = int(text) if text.isdigit() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; accepted is 0 to 65535")
    return value


def state_dir() -> str:
    """Where state is kept unless the command line says otherwise."""
    return os.environ.get("TIDEGATE_DIR") or os.path.join(
        os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "tidegate"
    )


def cache_dir() -> str:
    """Where downloads are kept unless the command line says otherwise; may be deleted at any time."""
    return os.environ.get("TIDEGATE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tidegate"
    )


if __name__ == "__main__":
    sys.exit(main())
