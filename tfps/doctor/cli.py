"""`tfps_doctor`: says whether a job would run here, and what to do if not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tfps.doctor.render import show
from tfps.doctor.run import examine
from tfps.version import __version__

_MAX_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 if a job would run, 1 if not, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="tfps_doctor",
        description="Checks whether a tfps job would run here: this host, and the pservers as seen from it. Does not "
        "disturb a job that runs. Exit code: 0 if a job would run, 1 if not; warnings count as 0.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "pservers",
        nargs="*",
        metavar="HOST:PORT",
        help="pservers (default: those of TFPS_PSERVERS or TF_CONFIG; without any, only this host is checked)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (docs/doctor.md has its keys)")
    parser.add_argument(
        "--token-file", default="", metavar="FILE", help="file with the job token (default: TFPS_TOKEN_FILE)"
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds to wait for each answer (default: %(default)s)"
    )
    parser.add_argument(
        "--no-tensorflow", action="store_true", help="do not import TensorFlow to count its GPUs, which takes seconds"
    )
    options = parser.parse_args(arguments)
    if not 0 < options.timeout <= _MAX_TIMEOUT_S:
        parser.error(f"--timeout must be a number of seconds up to {_MAX_TIMEOUT_S:.0f}, got {options.timeout}")
    try:
        report = examine(
            options.pservers,
            token_file=options.token_file,
            timeout_s=options.timeout,
            ask_tensorflow=not options.no_tensorflow,
        )
        if options.json:
            sys.stdout.write(json.dumps(report.as_json(), indent=1) + "\n")
        else:
            show(report)
    except KeyboardInterrupt:
        return 130
    return 0 if report.healthy else 1
