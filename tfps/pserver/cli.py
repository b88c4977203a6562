"""`tfps_pserver`: runs one pserver until SIGTERM or Ctrl-C, or shows the status of one."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tfps import __version__
from tfps.config import Security
from tfps.errors import TfpsError
from tfps.malloc import tune_malloc
from tfps.pserver.guard import LOOPBACK, check_host, default_host, is_loopback, reachable
from tfps.pserver.rendezvous import offer
from tfps.pserver.server import ParameterServer
from tfps.threads import Flag

logger = logging.getLogger("tfps")
_INTERVAL_S = 1.0  # between two status requests
_LOOK_S = 0.5  # between two looks whether a worker is left
_MOST_FILES = 2**20
_JOINING_S = 60.0  # that a worker may take from its joining to its streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Prints `tfps_pserver ready at HOST:PORT workers=N` to stdout."""
    parser = argparse.ArgumentParser(prog="tfps_pserver", description="Parameter server: sums what workers push.")
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add(
        "--host",
        help="address to listen on (default: all interfaces with a job token, TLS or --insecure, else this host only)",
    )
    ports = {
        "port": (7070, "port to listen on"),
        "data-port": (0, "port for slices from other hosts, announced to workers when they join"),
        "metrics-port": (None, "serve Prometheus metrics and /healthz over HTTP on this port"),
    }
    for name, (port, text) in ports.items():
        usual = "do not" if port is None else port
        add(f"--{name}", type=int, default=port, help=f"{text}, 0 picks a free one (default: {usual})")
    add("--workers", type=int, help="number of workers in a job")
    add(
        "--join",
        metavar="HOST:PORT",
        help="take part in the job that is under way on this pserver (docs/faults.md)",
    )
    add("--job", default="", help="serve only jobs of this name (default: any, one at a time)")
    add(
        "--metrics-host",
        default=LOOPBACK,
        help="address for --metrics-port, where whoever reaches it may read them; one beyond this host needs a job "
        "token, TLS or --insecure (default: %(default)s)",
    )
    for name, text in (
        ("token-file", "file with the job token, without which nobody may call or join"),
        ("tls-cert", "certificate of this pserver (PEM): turns TLS on"),
        ("tls-key", "its key, PEM"),
        ("tls-ca", "certificates (PEM) that must have signed those of workers; with --status: the pserver's"),
    ):
        variable = f"TFPS_{name.replace('-', '_').upper()}"
        add(f"--{name}", metavar="FILE", help=f"{text} (default: {variable})")
    add("--insecure", action="store_true", help="serve other hosts without a job token and without TLS")
    add(
        "--max-memory",
        type=float,
        metavar="GIB",
        help="what jobs may declare on this pserver (default: the memory of the machine or container)",
    )
    add(
        "--while-needed",
        action="store_true",
        help="end when standard input has ended and no worker is left: for a program that starts a pserver",
    )
    text = "at SIGTERM, wait up to so many seconds for workers that are still there (default %(default)g)"
    add("--linger", type=float, default=0.0, metavar="SECONDS", help=text)
    add("--quiet", action="store_true", help="log warnings only, not which jobs begin, end and fail")
    add(
        "--tell",
        action="store_true",
        help="say on standard output when a job begins, ends or fails, and who joins: for what starts a pserver",
    )
    add("--status", metavar="HOST:PORT", help="show the status of this pserver, do not run one")
    add("--json", action="store_true", help="with --status: print the status once, as JSON")
    options = parser.parse_args(arguments)
    if options.json and options.status is None:
        parser.error("--json belongs to --status")
    if options.workers is None and options.status is None:
        parser.error("the following arguments are required: --workers")
    for name in ports:
        if (port := getattr(options, name.replace("-", "_"))) is not None and not 0 <= port < 65536:
            parser.error(f"--{name} must be from 0 to 65535, got {port}")
    if options.max_memory is not None and not 0 < options.max_memory < 2**30:
        parser.error(f"--max-memory must be a positive number of GiB, got {options.max_memory}")
    try:
        names = ("insecure", "token_file", "tls_cert", "tls_key", "tls_ca")
        security = Security.from_environment(**{name: getattr(options, name) for name in names})
        return (_serve if options.status is None else _status)(options, security)
    except TfpsError as error:
        print(f"tfps_pserver: {error}", file=sys.stderr)
        return 1


class _Lines(logging.Formatter):
    """Each line begins with the program's name, in place of that of the package where it has that."""

    def format(self, record: logging.LogRecord) -> str:
        return f"tfps_pserver: {super().format(record).removeprefix('tfps: ')}"


@contextlib.contextmanager
def _at_signals(call: Callable[[], None]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: call()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _allow_many_files() -> None:
    """Connections of strangers take file descriptors, too."""
    with contextlib.suppress(ValueError, OSError):  # where the system has a limit of its own beside these
        now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
        if now != resource.RLIM_INFINITY and now < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _serve(options: argparse.Namespace, security: Security) -> int:
    tune_malloc(one_arena=True)
    _allow_many_files()
    level = logging.WARNING if options.quiet else logging.INFO
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logging.basicConfig(level=level, handlers=[handler])
    stop = Flag()
    with _at_signals(stop.set):
        _run(options, security, stop)
    return 0


def _run(options: argparse.Namespace, security: Security, stop: Flag) -> None:
    host = options.host or default_host(security)
    if options.metrics_port is not None:
        check_host(options.metrics_host, security, metrics=True)
    server = ParameterServer(
        host,
        options.port,
        workers=options.workers,
        job=options.job,
        data_port=options.data_port,
        security=security,
        max_memory=None if options.max_memory is None else int(options.max_memory * 2**30),
        on_job=_tell if options.tell else lambda what: None,
    )
    _say_who_may_come(options.host, host, security)
    metrics = None
    try:
        if options.metrics_port is not None:
            from tfps.pserver.metrics import MetricsServer  # its dependencies are optional

            metrics = MetricsServer(server, options.metrics_host, options.metrics_port)
            address = f"{reachable(options.metrics_host)}:{metrics.port}"
            print(f"tfps_pserver: metrics at http://{address}/metrics", file=sys.stderr, flush=True)
            if not (security.token_file or security.tls_cert or is_loopback(options.metrics_host)):
                logger.warning("--insecure: everybody who reaches %s may read its metrics", options.metrics_host)
        print(f"tfps_pserver ready at {server.address} workers={options.workers}", flush=True)
        if options.join is not None:
            offer(options.join, server.address, options.workers, security)
        if options.while_needed:
            threading.Thread(target=_stop_when_unneeded, args=(server, stop), name="tfps-unneeded", daemon=True).start()
        stop.wait()
        end_s = time.monotonic() + options.linger
        while time.monotonic() < end_s and any(each.state == "streaming" for each in server.status().members):
            time.sleep(_LOOK_S)
    finally:
        server.stop()
    if metrics is not None:
        metrics.stop()


def _tell(what: str) -> None:
    print(f"tfps_pserver: {what}", flush=True)


def _stop_when_unneeded(server: ParameterServer, stop: Flag) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    ended_s = time.monotonic()
    while not stop.wait(_LOOK_S):
        states = {member.state for member in server.status().members}
        if "streaming" not in states and ("joined" not in states or time.monotonic() - ended_s > _JOINING_S):
            stop.set()


def _say_who_may_come(asked: str | None, host: str, security: Security) -> None:
    """Logs what somebody who starts a pserver may not expect."""
    if is_loopback(host):
        if asked is None:
            logger.info(
                "listens on this host only: other hosts need --token-file FILE (or --tls-cert and --tls-key, or "
                "--insecure); see docs/security.md"
            )
        if not (security.token_file or security.tls_ca):
            logger.warning("no job token: every user of this host may join, read and end its jobs; see --token-file")
    elif not (security.token_file or security.tls_ca):
        why = "TLS without --tls-ca and --token-file" if security.tls_cert else "--insecure"
        logger.warning("%s: everybody who reaches %s may join, read and end its jobs", why, host)


def _status(options: argparse.Namespace, security: Security) -> int:
    from tfps.pserver.console import Watcher, show

    with contextlib.closing(Watcher(options.status, security)) as watcher, _at_signals(watcher.stop):
        if not options.json:
            show(watcher, _INTERVAL_S)
        elif (look := watcher.look(_INTERVAL_S)) is not None:
            print(json.dumps(look.as_json(), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
