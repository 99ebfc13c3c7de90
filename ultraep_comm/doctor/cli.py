"""Command line of ``python -m ultraep_comm.doctor``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from ultraep_comm.doctor.diagnose import ERROR, REQUIRABLE, diagnose
from ultraep_comm.doctor.facts import collect
from ultraep_comm.doctor.screen import format_screen
from ultraep_comm.system import INTERRUPTED

FORMAT = 1  # of the JSON document; a change that only adds fields keeps the number
BROKEN = 1
_LIMIT = 60.0  # importing torch from a network's file system can take that long


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is here; return 0, or 1 if something is broken, or required and missing."""
    options = make_parser().parse_args(arguments)
    try:
        facts = collect(options.timeout)
    except KeyboardInterrupt:
        return INTERRUPTED
    findings = diagnose(facts, options.require)
    status = BROKEN if any(finding.severity == ERROR for finding in findings) else 0
    if options.json:
        document = {
            "format": FORMAT,
            "status": status,
            "auto": facts.taken,
            **vars(facts),
            "findings": findings,
        }
        print(json.dumps(document, indent=1, default=vars))
    else:
        print(format_screen(facts, findings))
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="python -m ultraep_comm.doctor",
        description="Show which GPUs, driver and libraries are here, what engine='auto' and"
        " fabric='auto' take and why, and what is missing with the command that mends it."
        " Where there is a GPU it loads the device kernels, and initialises NVSHMEM in a process"
        " of its own, with its symmetric heap.",
        epilog="Exit status: 0 fine for what is here, 1 something is broken, or is required and"
        " missing, 2 wrong usage.",
    )
    parser.add_argument(
        "--require",
        nargs="+",
        default=[],
        choices=REQUIRABLE,
        metavar="WHAT",
        help="fail if it is missing: device (a usable GPU), cuda (that engine), nvshmem (that"
        " fabric), p2p (load/store access between all GPUs)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON document instead")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=_LIMIT,
        metavar="SECONDS",
        help="for each probe, after which it counts as broken (default %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, below 1e6")
    return value
