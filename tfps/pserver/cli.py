"""`tfps_pserver`: runs one pserver until SIGTERM or Ctrl-C, or shows the status of one."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable, Sequence

from tfps.errors import TfpsError
from tfps.pserver.server import ParameterServer
from tfps.threads import Flag
from tfps.wire.memory import tune_malloc

_INTERVAL_S = 1.0  # between two status requests


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Prints `tfps_pserver ready at HOST:PORT workers=N` to stdout."""
    parser = argparse.ArgumentParser(prog="tfps_pserver", description="Parameter server: sums what workers push.")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all interfaces)")
    parser.add_argument("--port", type=int, default=7070, help="port to listen on; 0 picks a free one (default: 7070)")
    parser.add_argument("--workers", type=int, help="number of workers in a job")
    parser.add_argument("--job", default="", help="serve only jobs of this name (default: any, one at a time)")
    parser.add_argument(
        "--data-port",
        type=int,
        default=0,
        help="port for slices from other hosts, announced to workers when they join; 0 picks a free one (default: 0)",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        help="serve Prometheus metrics and /healthz over HTTP on this port, 0 picks a free one (default: do not)",
    )
    parser.add_argument("--status", metavar="HOST:PORT", help="show the status of this pserver, do not run one")
    parser.add_argument("--json", action="store_true", help="with --status: print the status once, as JSON")
    options = parser.parse_args(arguments)
    if options.json and options.status is None:
        parser.error("--json belongs to --status")
    if options.workers is None and options.status is None:
        parser.error("the following arguments are required: --workers")
    for name in ("port", "data_port", "metrics_port"):
        if (port := getattr(options, name)) is not None and not 0 <= port < 65536:
            parser.error(f"--{name.replace('_', '-')} must be from 0 to 65535, got {port}")
    try:
        return _status(options) if options.status is not None else _serve(options)
    except TfpsError as error:
        print(f"tfps_pserver: {error}", file=sys.stderr)
        return 1


def _at_signals(call: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: call())


def _serve(options: argparse.Namespace) -> int:
    tune_malloc(one_arena=True)
    logging.basicConfig(level=logging.INFO, format="tfps_pserver: %(message)s", stream=sys.stderr)
    stop = Flag()
    _at_signals(stop.set)
    server = ParameterServer(
        options.host, options.port, workers=options.workers, job=options.job, data_port=options.data_port
    )
    try:
        with_metrics = None if options.metrics_port is None else _metrics(server, options.host, options.metrics_port)
        print(f"tfps_pserver ready at {server.address} workers={options.workers}", flush=True)
        stop.wait()
    finally:
        server.stop()
    if with_metrics is not None:
        with_metrics()
    return 0


def _metrics(server: ParameterServer, host: str, port: int) -> Callable[[], None]:
    """Starts serving metrics; returns a function that stops it."""
    from tfps.pserver.metrics import MetricsServer  # its dependencies are optional

    metrics = MetricsServer(server, host, port)
    print(
        f"tfps_pserver: metrics at http://{server.address.rpartition(':')[0]}:{metrics.port}/metrics",
        file=sys.stderr,
        flush=True,
    )
    return metrics.stop


def _status(options: argparse.Namespace) -> int:
    from tfps.pserver.console import Watcher, show

    watcher = Watcher(options.status)
    _at_signals(watcher.stop)
    try:
        if not options.json:
            show(watcher, _INTERVAL_S)
        elif (look := watcher.look(_INTERVAL_S)) is not None:
            print(json.dumps(look.as_json(), indent=1))
    finally:
        watcher.close()
    return 0
