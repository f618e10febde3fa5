"""The commands about models and services, for the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from agents.options import whole_number

Call = Callable[[str, str], Callable[[argparse.Namespace], int]]

_SAMPLES_HELP = "inputs of the model: arrays by input name, or NUMBER/INPUT for several samples"


def add_model_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    """`tidegate model ...` and `tidegate service ...`; `call` finds the function that runs one."""
    model = commands.add_parser("model", help="ONNX models")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    _add(actions, call)
    listing = actions.add_parser("list", help="registered models")
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=call("model_list", "model_commands"))
    show = actions.add_parser("show", help="a model's blocks and what they cost")
    show.add_argument("name")
    show.add_argument("--json", action="store_true")
    show.add_argument("--svg", metavar="FILE", help="draw them there instead of printing them")
    show.add_argument(
        "--device", metavar="TYPE", help="their times on this type of device (its name, or how that begins)"
    )
    show.set_defaults(run=call("model_show", "model_commands"))
    _variant(actions, call)
    _activations(actions, call)
    _calibration(actions, call)
    delete = actions.add_parser("delete", help="forget a model, with its own service and variants")
    delete.add_argument("name")
    delete.set_defaults(run=call("model_delete", "model_commands"))
    _services(commands, call)


def _add(actions: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    add = actions.add_parser("add", help="register an ONNX file: cut, prove, profile")
    add.add_argument("name")
    add.add_argument("file", metavar="FILE.onnx", help="weights in other files beside it are sent as well")
    add.add_argument("--sample", metavar="FILE.npz", help="an array per input, if generated ones do not suit the model")
    add.add_argument("--axis", choices=("patch", "token"), help="what axis 0 of the inputs means (default: looked for)")
    add.add_argument(
        "--accuracy", type=_share, default=1.0, metavar="X", help="share of right answers, as you measured it"
    )
    add.add_argument("--json", action="store_true")
    add.set_defaults(run=call("model_add", "model_commands"))


def _variant(actions: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    variant = actions.add_parser(
        "variant", help="register NAME.SUFFIX, measured against NAME, as a choice of the solver"
    )
    variant.add_argument("name", help="a registered model")
    variant.add_argument("suffix", help="the variant is called NAME.SUFFIX")
    how = variant.add_mutually_exclusive_group(required=True)
    how.add_argument("--precision", choices=("fp16", "int8", "int8-static"))
    how.add_argument(
        "--prune-tokens", nargs="?", const="", metavar="AFTER",
        help="drop tokens behind this layer (a number from 0, or the name of a value; default: a quarter of the way)",
    )  # fmt: skip
    how.add_argument(
        "--prune-cache",
        action="store_true",
        help="a decoder that keeps a share of its cache, turned with: tidegate service tune",
    )
    how.add_argument("--file", metavar="OTHER.onnx", help="a smaller model with the same inputs and outputs")
    variant.add_argument("--keep", type=_share, metavar="X", help="share of the tokens or cache entries that stay")
    variant.add_argument("--protect", type=whole_number(0), default=1, help="tokens that always stay (default 1)")
    variant.add_argument("--restore", default="", metavar="LAYER", help="all tokens are there again behind this layer")
    variant.add_argument("--calibration", metavar="FILE.npz", help="for int8-static; see: tidegate model calibration")
    variant.add_argument(
        "--preprocessing", metavar="NAME", help="what makes the inputs of inference, as in the calibration"
    )
    variant.add_argument("--samples", required=True, metavar="FILE.npz", help=_SAMPLES_HELP)
    variant.add_argument("--labels", metavar="FILE.npz", help="`labels`: the right class of each item of the samples")
    variant.add_argument("--classes", action="store_true", help="outputs are class scores: compare the strongest class")
    variant.add_argument("--json", action="store_true")
    variant.set_defaults(run=call("model_variant", "model_commands"))


def _activations(actions: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    travel = actions.add_parser("activations", help="how values travel between the shards of a model")
    travel.add_argument("name")
    travel.add_argument("format", choices=("fp32", "fp16", "int8"))
    travel.add_argument("--samples", metavar="FILE.npz", help=f"to measure the error; {_SAMPLES_HELP}")
    travel.add_argument("--classes", action="store_true", help="outputs are class scores: compare the strongest class")
    travel.add_argument("--json", action="store_true")
    travel.set_defaults(run=call("model_activations", "model_commands"))


def _calibration(actions: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    calibration = actions.add_parser("calibration", help="calibration sets for int8-static; needs no controller")
    kinds = calibration.add_subparsers(required=True, metavar="ACTION")
    make = kinds.add_parser("make", help="write one from samples by scene")
    make.add_argument("out", metavar="OUT.npz")
    make.add_argument("--preprocessing", required=True, metavar="NAME", help="what made the inputs, e.g. clip-224-v1")
    make.add_argument(
        "--scene", action="append", required=True, metavar="NAME=WEIGHT:PATH",
        help="PATH: a directory with one .npz per sample, or one .npz with samples along axis 0 of every array",
    )  # fmt: skip
    make.add_argument("--json", action="store_true")
    make.set_defaults(run=call("calibration_make", "calibration_commands"))
    check = kinds.add_parser("check", help="say what is in one")
    check.add_argument("file", metavar="FILE.npz")
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=call("calibration_check", "calibration_commands"))


def _services(commands: argparse._SubParsersAction[argparse.ArgumentParser], call: Call) -> None:
    service = commands.add_parser("service", help="services")
    actions = service.add_subparsers(required=True, metavar="ACTION")
    builtin = actions.add_parser("add", help="register a service that comes with Tidegate")
    builtin.add_argument("name", help="document-reader")
    builtin.set_defaults(run=call("service_add", "model_commands"))
    services = actions.add_parser("list", help="registered services")
    services.add_argument("--json", action="store_true")
    services.set_defaults(run=call("service_list", "service_commands"))
    look = actions.add_parser("show", help="a service's interface and its knobs")
    look.add_argument("service")
    look.add_argument("--json", action="store_true")
    look.set_defaults(run=call("service_show", "service_commands"))
    tune = actions.add_parser("tune", help="turn knobs while requests run; nothing is loaded again")
    tune.add_argument("service")
    tune.add_argument(
        "knobs", nargs="+", metavar="STAGE.KNOB=VALUE", help="a number, or auto: follow the memory bandwidth"
    )
    tune.set_defaults(run=call("service_tune", "service_commands"))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; accepted is more than 0 and at most 1")
    return value
