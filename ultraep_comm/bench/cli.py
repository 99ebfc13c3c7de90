"""Command line of ``python -m ultraep_comm.bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ultraep_comm.bench import (
    calibrate,
    critical_path,
    device,
    device_reduce,
    layer,
    links,
    model,
    plan,
    plan_device,
    reduce,
    replicate,
    validate,
)
from ultraep_comm.bench.calibrate_settings import (
    add_calibrate_command,
    make_calibrate_settings,
)
from ultraep_comm.bench.critical_path_settings import add_path_command, make_path_settings
from ultraep_comm.bench.launch import FAILED, INTERRUPTED, launched_rank, run_alone, run_ranks
from ultraep_comm.bench.layer_settings import add_layer_command, make_layer_settings
from ultraep_comm.bench.links_settings import add_links_command, make_links_settings
from ultraep_comm.bench.model_settings import add_model_command, make_model_settings
from ultraep_comm.bench.plan_settings import add_plan_command, make_plan_settings
from ultraep_comm.bench.reduce_settings import add_reduce_command, make_reduce_settings
from ultraep_comm.bench.replicate_settings import add_replicate_command, make_settings
from ultraep_comm.bench.show import add_show_command, show
from ultraep_comm.bench.validate_settings import add_validate_command, make_validate_settings
from ultraep_comm.errors import CalibrationError, InvalidArgumentError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status.

    0: all is well; 1: wrong bytes; 2: other errors; 3: a gate is not met; 130: interrupted;
    128 and a signal's number: it ended a rank.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "show":
            return show(options.file)
        run, settings = _choose(options)
    except (InvalidArgumentError, CalibrationError, OSError) as error:
        if _speaks():
            print(f"error: {error}", file=sys.stderr)
        return FAILED
    try:
        if options.command in ("plan", "model"):
            return run_alone(run, settings)
        if settings.fabric == "loopback":
            return run_alone(run, settings)
        return run_ranks(run, settings, settings.num_ranks)
    except KeyboardInterrupt:
        return INTERRUPTED


def _choose(options: argparse.Namespace) -> tuple[Callable[[Any], int], Any]:
    """Return what runs on every rank, and its checked settings."""
    if options.command == "plan":
        planned = make_plan_settings(options)
        return plan.run if planned.engine == "host" else plan_device.run, planned
    if options.command == "model":
        return model.run, make_model_settings(options)
    if options.command == "critical-path":
        return critical_path.run, make_path_settings(options)
    if options.command == "reduce":
        reducing = make_reduce_settings(options)
        return reduce.run if reducing.engine == "host" else device_reduce.run, reducing
    if options.command == "calibrate":
        return calibrate.run, make_calibrate_settings(options)
    if options.command == "links":
        return links.run, make_links_settings(options)
    if options.command == "validate":
        return validate.run, make_validate_settings(options)
    if options.command == "layer":
        return layer.run, make_layer_settings(options)
    settings = make_settings(options)
    return replicate.run if settings.engine == "host" else device.run, settings


def _speaks() -> bool:
    try:
        return launched_rank() == 0
    except InvalidArgumentError:
        return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ultraep_comm.bench",
        description="Measure transfers of experts, what surrounds them, and the links under them."
        " Flags are those of nccl-tests where it has them; COMMAND --help lists a command's.",
        epilog="Exit status: 0 all is well, 1 wrong bytes or values, 2 other errors, 3 a limit is"
        " not met, 130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_replicate_command(commands)
    add_reduce_command(commands)
    add_plan_command(commands)
    add_model_command(commands)
    add_path_command(commands)
    add_layer_command(commands)
    add_links_command(commands)
    add_calibrate_command(commands)
    add_validate_command(commands)
    add_show_command(commands)
    return parser
