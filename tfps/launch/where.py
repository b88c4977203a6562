"""`tfps_launch --logdir DIR`: has a job recorded for TensorBoard, and says where to look while it runs."""

from __future__ import annotations

import shlex

from tfps.errors import ConfigError
from tfps.launch.hosts import LOOPBACK, Placement

FIRST, LAST = 10, 20  # steps to record: until then TensorFlow traces the model and slice sizes are tuned


def check_logdir(logdir: str | None) -> None:
    """
    Raises:
        ConfigError: `logdir` is given, but empty, as by a variable of a shell that is not set.
    """
    if logdir is not None and not logdir.strip():
        raise ConfigError(f"--logdir must name a directory, as in --logdir logs, got {logdir!r}")


def trace_variables(logdir: str | None) -> dict[str, str]:
    """The environment variables by which a worker records steps to `logdir`; none without it.

    They replace what the launcher inherits: arguments win. See `tfps.config.TraceRequest`.
    """
    return {} if logdir is None else {"TFPS_TRACE": f"{logdir}:{FIRST}-{LAST}"}


def where_to_look(logdir: str | None, place: Placement, metrics_port: int | None) -> list[str]:
    """Lines for the user: a command that can be pasted, and addresses. None without `logdir`.

    Args:
        metrics_port: pserver 0's on 127.0.0.1 of its host, others count up from it. With None there are no metrics;
            with 0 only the pservers know where, and say so themselves.
    """
    if logdir is None:
        return []
    # Rank 0 writes, on its host.
    lines = [f"tensorboard --logdir {shlex.quote(logdir)}{_elsewhere(place.workers[0], '  # on {}')}"]
    if metrics_port:
        urls = [
            f"http://127.0.0.1:{metrics_port + index}/metrics{_elsewhere(host, ' (on {})')}"
            for index, host in enumerate(place.pservers)
        ]
        lines.append(f"metrics at {' '.join(urls)}")
    return lines


def _elsewhere(host: str, text: str) -> str:
    """`text` with the name of `host`; "" if that is this one."""
    return "" if host in LOOPBACK else text.format(host)
