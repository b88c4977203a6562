"""`tfps.Strategy`: data-parallel training of Keras models through gRPC parameter servers."""

from __future__ import annotations

import itertools
import logging
import pathlib
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfps.cluster import Cluster, resolve
from tfps.config import Config
from tfps.embedded import EmbeddedExchange
from tfps.errors import ConfigError
from tfps.exchange import Exchange
from tfps.extended import Extended
from tfps.report import Report
from tfps.runtime import Runtime
from tfps.trace import Recorder
from tfps.worker import Worker

_collective_key_bases = itertools.count(1_000, 1_000)


class Strategy(tf.distribute.Strategy):
    """Synchronous data-parallel training; gradients travel while the step still runs.

    Each worker process creates one, builds and compiles its model in `scope()` and calls `fit`. Gradients are sent
    as soon as backward makes them, what forward needs first most urgently (P3,
    https://anandj.in/wp-content/uploads/sysml.pdf), summed by the pservers, and each variable is updated as soon as
    its sum is back, while the next step already runs; a read of a variable waits for that variable only.

    Args:
        pservers: addresses `"host:port"`; or a `tf.distribute.cluster_resolver.ClusterResolver`; or None:
            `TFPS_PSERVERS` (set by `tfps_launch`) or the `ps` tasks of `TF_CONFIG`, and with neither a pserver embedded
            in this process.
        devices: local devices, as for `tf.distribute.MirroredStrategy`; default: all local GPUs, else the CPU.
        config: settings; default: `tfps.Config` with what `TFPS_...` environment variables say.

    Raises:
        ConfigError: an argument or an environment variable is malformed.
        ConnectError: a pserver cannot be reached or refuses this worker.
        WaitTimeoutError: not all workers joined within `config.connect_timeout_s`.
    """

    def __init__(
        self,
        pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        devices: Sequence[str] | None = None,
        config: Config | None = None,
    ) -> None:
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"config must be a tfps.Config, got {config!r}")
        self.config = Config.from_environment() if config is None else config
        cluster = resolve(pservers)
        self._collective_key_base = next(_collective_key_bases)  # two strategies' local reductions must not meet
        self._recorder = Recorder()
        _show_messages()
        devices = _devices(devices)
        exchange = _exchange(cluster, self.config, self._recorder)
        self._pservers = cluster.pservers
        self._runtime = Runtime(exchange, self._recorder, self.config.step_timeout_s)
        self._at_end = weakref.finalize(self, _close_at_end, self._runtime)
        super().__init__(Extended(self, devices, self._runtime, self.config.bucket_bytes))

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._runtime.exchange.rank

    @property
    def num_workers(self) -> int:
        """How many workers train together."""
        return self._runtime.exchange.workers

    @property
    def pservers(self) -> tuple[str, ...]:
        """Addresses of the pservers; empty when the pserver is embedded."""
        return self._pservers

    def update_buckets(self) -> int:
        """How many buckets with deferred updates there are; each is one exchange per step."""
        return self._runtime.update_buckets()

    def report(self) -> Report:
        """Where the time of the last steps went on this worker, what limits it, and what would help; printable.

        Raises:
            TfpsError: there were fewer than 4 steps, or a pserver does not answer.
        """
        return self._runtime.report()

    def dump_graph(self, path: str | pathlib.Path, function: str | None = None) -> None:
        """Writes what a traced training step does with gates, buckets and updates as a picture, in Graphviz's DOT.

        `dot -Tsvg step.dot -o step.svg` draws it. Priorities, sizes and slices are those of now.

        Args:
            path: the file to write.
            function: which one, where several functions train: its name, `"one_step_on_data"` of Keras' `fit` for
                example; default: the one that was traced last.

        Raises:
            ConfigError: no such function has been traced; the message lists those that were.
            TfpsError: no training step has been traced yet.
        """
        pathlib.Path(path).write_text(self.extended.picture(function).dot(), encoding="utf-8")

    @property
    def recorder(self) -> Recorder:
        """Records what happens to slices while it is started."""
        return self._recorder

    def close(self) -> None:
        """Leaves the job and ends all threads, after which training raises. Happens by itself when the process ends."""
        self._at_end.detach()
        self._runtime.close()


def _show_messages() -> None:
    """One line on stderr per event, such as the sizes that were chosen, if the program has not set up logging."""
    logger = logging.getLogger("tfps")
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)


def _close_at_end(runtime: Runtime) -> None:
    # sys.last_type is set when the interpreter ends because of an exception: then nobody should wait for this worker.
    drain = not hasattr(sys, "last_type")
    if threading.current_thread() is threading.main_thread():
        runtime.close(drain=drain)
    else:  # the garbage collector runs on any thread, also on one that brings the replies that close waits for
        threading.Thread(target=runtime.close, kwargs={"drain": drain}, name="tfps-close").start()


def _devices(devices: Sequence[str] | None) -> Sequence[str]:
    if devices is None:
        return [device.name for device in tf.config.list_logical_devices("GPU")] or ["CPU:0"]
    if isinstance(devices, str) or not devices:
        raise ConfigError(f"devices must be a list such as ['GPU:0', 'GPU:1'], got {devices!r}")
    return list(devices)


def _exchange(cluster: Cluster, config: Config, recorder: Recorder) -> Exchange:
    if not cluster.pservers:
        return EmbeddedExchange(config)
    options: dict[str, Any] = {"rank": cluster.rank, "workers": cluster.workers, "job": cluster.job}
    return Worker(cluster.pservers, **options, config=config, recorder=recorder)
