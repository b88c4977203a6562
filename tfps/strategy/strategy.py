"""`tfps.Strategy`, and the cluster that its arguments and the environment name."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import pathlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from tfps.config import (
    Config,
    Launch,
    Security,
    TraceRequest,
    checks_names,
    clusters_by_itself,
    unknown_variables,
    with_variables,
)
from tfps.embeddings.saving import restore_tables, save_tables
from tfps.errors import ConfigError, TfpsError, for_others, in_a_line, outlined
from tfps.exchange.interface import Exchange
from tfps.graph.compile_cache import use_cache
from tfps.graph.patches import BaseStrategy, open_strategies
from tfps.graph.shares import in_keras_step, say_once
from tfps.graph.tf_private import check_effects
from tfps.input.caches import cache_apart
from tfps.keras_hooks.random_numbers import share_random_states
from tfps.launch.cluster_spec import Cluster, cluster_of, from_tasks, locate, pservers_of, started_with
from tfps.launch.rendezvous import rendezvous
from tfps.recovery.exchange import ElasticExchange
from tfps.runtime.report import Report
from tfps.runtime.runtime import Runtime
from tfps.runtime.trace_run import TraceRun, record_unattended
from tfps.strategy.extended import Extended
from tfps.strategy.patches import install_all
from tfps.strategy.preemption import leave_on_sigterm
from tfps.strategy.tasks import resolver_of
from tfps.threads import finalize
from tfps.trace.recorder import Recorder
from tfps.types import Argument, Batches
from tfps.worker.embedded import EmbeddedExchange
from tfps.worker.worker import Worker

__all__ = ["Cluster", "find", "resolve"]


def find(pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None, config: Config) -> Cluster:
    """Returns the cluster. Processes of mpirun or srun to which nobody has named pservers start their own.

    From then on this process's environment says where they are, as if `tfps_launch` had started it: later strategies
    use the same, and so do processes that the program starts.
    """
    cluster = resolve(pservers)
    if cluster.others is None:
        return cluster
    security = Security.of_worker(config)
    if security.tls_ca:
        raise ConfigError(
            f"the pservers that processes of {cluster.others.source} start for themselves have no TLS, but tls_ca is "
            "set; start tfps_pserver with its certificates and set TFPS_PSERVERS"
        )
    os.environ.update(rendezvous(cluster.others, security.token_file, config.connect_timeout_s))
    found = resolve(None)
    if not found.pservers:  # an embedded one would let each process train alone
        raise ConfigError(
            f"{cluster.others.source} has started {cluster.others.workers} processes, but none of them has started a "
            "pserver; start tfps_pserver and set TFPS_PSERVERS=HOST:PORT,..."
        )
    return found


def resolve(
    pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    """Returns the cluster that `pservers` and the environment describe.

    Only a resolver's addresses, rank and number of workers count if there is one, but for a rank that it does not know:
    `TFPS_RANK` and `TFPS_WORKERS`, the variables of mpirun or srun, or the order of joining.
    """
    environment = os.environ if environment is None else environment
    if not isinstance(pservers, tf.distribute.cluster_resolver.ClusterResolver):
        return locate(pservers, environment)
    launch = Launch.from_environment(environment)
    others = started_with(launch, environment)
    spec = pservers.cluster_spec()  # first: this makes SlurmClusterResolver find its task
    named, resolver = spec.as_dict() if spec else {}, type(pservers).__name__
    tasks = from_tasks(named, pservers.task_type, pservers.task_id, resolver, may_not_know=True)
    if tasks.is_evaluator:
        return Cluster(job=launch.job)
    addresses, rank, workers = pservers_of(tasks), tasks.rank, tasks.workers
    if rank is None and launch.rank is not None:
        rank, workers = launch.rank, workers or launch.workers
    elif rank is None and others is not None and workers in (None, others.workers):
        rank, workers = others.rank, others.workers
    return cluster_of(addresses, rank, workers, launch.job, others)


logger = logging.getLogger("tfps")
_collective_key_bases = itertools.count(1_000, 1_000)


class Strategy(BaseStrategy):
    """Data-parallel training; gradients are exchanged while the step still runs.

    Each worker process creates one, builds and compiles its model in `scope()` and calls `fit`. Each gradient is sent
    as soon as backward computes it, with the highest priority for what forward needs first (P3,
    https://anandj.in/wp-content/uploads/sysml.pdf). The pservers sum gradients, and each variable is updated when its
    sum arrives, while the next step already runs. A read of a variable waits for that variable only. So it is by
    default; `Config.mode` and `Config.update` have other ways.

    Args:
        pservers: addresses `"host:port"`; or a `tf.distribute.cluster_resolver.ClusterResolver` (Slurm, Kubernetes,
            Simple, ...) with `ps` tasks; or None for `TFPS_PSERVERS` (set by `tfps_launch`), else the `ps` tasks of
            `TF_CONFIG`, else those that the processes of one mpirun or srun start, else a pserver embedded in this
            process. The chief is rank 0; an evaluator is a separate job
            (docs/contract.md, "Cluster").
        devices: local devices, as for `tf.distribute.MirroredStrategy`; default: all local GPUs, else the CPU.
        config: settings; `TFPS_...` environment variables fill what it leaves at its default.

    Attributes:
        config: the settings in use.

    Raises:
        ConfigError: an argument or an environment variable is malformed.
        ConnectError: a pserver cannot be reached or refuses this worker.
        UnsupportedError: this TensorFlow does not behave as tfps needs.
        WaitTimeoutError: not all workers joined within `config.connect_timeout_s`.
    """

    @checks_names("tfps.Strategy")
    def __init__(
        self,
        pservers: Sequence[str] | tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        devices: Sequence[str] | None = None,
        config: Config | None = None,
    ) -> None:
        if config is not None and not isinstance(config, Config):
            raise ConfigError(f"config must be a tfps.Config, got {config!r}")
        settings, ignored = with_variables(config or Config())
        self.config = settings
        request = TraceRequest.from_environment()
        if settings.xla_cache:
            use_cache(settings.xla_cache)  # first: tf.config.optimizer.get_jit reads the flags, too
        _show_messages(ignored)
        cluster = find(pservers, self.config)
        self._collective_key_base = next(_collective_key_bases)  # local reductions of two strategies must not mix
        if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable) or not devices):
            raise ConfigError(f"devices must be a list such as ['GPU:0', 'GPU:1'], got {devices!r}")
        devices = devices or [gpu.name for gpu in tf.config.list_logical_devices("GPU")] or ["CPU:0"]
        check_effects()
        given = isinstance(pservers, tf.distribute.cluster_resolver.ClusterResolver)
        self._resolver = pservers if given else None
        self._user = next(_users)
        try:
            self._connection = _connect(cluster, self.config, self._user)
        except TfpsError as error:
            raise outlined(error) from None  # its text has what gRPC said
        self._runtime = self._connection.runtime
        record_unattended(self._runtime, request)
        self._forget = weakref.finalize(self, _forget, self._connection, self._user)
        self._forget.atexit = False
        super().__init__(Extended(self, devices, self._runtime, self.config))
        open_strategies.add(self)
        if self.extended.staging is not None:
            self._connection.users[self._user].callback(self.extended.staging.close)
        install_all()
        if self.extended.changes:
            leave_on_sigterm(self._runtime, None if self.extended.staging is None else self.extended.staging.agreement)

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas all workers have. A step of Keras need not divide by it: its gradients are averaged."""
        if in_keras_step():
            say_once(
                "a step of Keras (train_step, test_step) reads num_replicas_in_sync: it must not divide its loss by "
                "that, or gradients are too small; tfps takes the mean over all rows itself, so compute the loss of "
                "the step's own rows, as in one process"
            )
        return len(self.extended._devices) * self.num_workers

    @property
    def rank(self) -> int:
        """This worker's place among those that take part, from 0. It may change if others are lost (`min_workers`).

        It does not when others end: who asks for it after training gets one rank 0, as who asks before.
        """
        return self._runtime.exchange.places.index(self._runtime.exchange.rank)

    @property
    def num_workers(self) -> int:
        """How many workers train together now."""
        return len(self._runtime.exchange.places)

    @property
    def pservers(self) -> tuple[str, ...]:
        """Addresses of the pservers; empty when the pserver is embedded."""
        return self._connection.cluster.pservers

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """Which task of the job this process is, for programs that ask for the chief; `rank == 0` says it shorter.

        What `pservers` or TF_CONFIG has, if this process is there. Else its `task_type` is "worker", its `task_id` the
        rank, and its `cluster_spec()` has all workers, by names without addresses, and pservers.
        """
        return resolver_of(self, self._resolver)

    def report(self) -> Report:
        """Returns where the last steps' time went on this worker, what limits speed and what would help; printable.

        In mode "diloco" and "local" it is about rounds of `config.inner_steps` steps instead of steps.

        Raises:
            TfpsError: there were fewer than 4 steps, or a pserver does not answer.
        """
        return self.extended.compiled.in_report(self._runtime.report(self.extended.policy.stepping()))

    def combine(self) -> None:
        """Combines what each worker has for itself: variables that replicas write (moving statistics, metrics), and
        the residuals of compression.

        Reading them after training steps combines them, and all ranks must read them alike; `fit` and `evaluate` do
        so at the end of each epoch. To read or save them at another time on one rank only, call this on every rank
        first. Does nothing if nothing was written or sent since the last time. If it combines variables, the ranks also
        compare all that they must have alike (`Config.check_every` above 0, mode "sync").

        Raises:
            MismatchError: a variable differs between ranks.
            TfpsError: another rank did not call it in time, or is elsewhere in its program.
        """
        combined = self.extended.combiner.refresh()
        self.extended.compressing.collect()
        if combined and self.extended.states is not None:
            self.extended.states.compare("at a call of combine()")

    def save_tables(self, path: str | pathlib.Path, *, incremental: bool = False) -> None:
        """Saves the rows and slots of all tables (`tfps.layers.Embedding`) that have been trained or restored.

        The pservers write at the same time, each its own, as this worker's last step has left them; training waits.
        Every rank may call it: rank 0 has it done. `model.save`, `save_weights` and Keras' callbacks save rows by
        themselves.

        Args:
            path: a folder that all pservers can reach, which has one save, of any number of pservers.
            incremental: add what has changed since the last call with this path, instead of writing all anew.

        Raises:
            ConfigError: the folder has something else.
            OSError, TfpsError: a pserver could not write.
        """
        save_tables(path, self, incremental=incremental)

    def restore_tables(self, path: str | pathlib.Path) -> None:
        """Replaces the rows of all tables by what `save_tables` has saved, on any number of pservers.

        Slots, too, if a table's optimizer has the same ones. Every rank must call it.

        Raises:
            ConfigError: a table is missing there, was of another kind, or a file is damaged.
        """
        restore_tables(path, self)

    def synchronize(self) -> None:
        """Brings all workers to the same parameters where they do not step together (`Config.mode`; docs/modes.md).

        In mode "async" these are the latest. In "diloco" and "local" it ends the round: workers exchange what they have
        trained since the last exchange, and those that have made fewer steps than others make up for the exchanges
        that they have not come to. Every rank must call it. `fit` does so: "async" at the end of each epoch, the others
        at its end. A custom loop needs it where numbers of steps differ between workers, and at its end: before it
        evaluates or saves. Does nothing in mode "sync", or if nothing was trained since.

        Raises:
            TfpsError: another rank did not call it in time, or the exchange failed.
        """
        self.extended.policy.synchronize()

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Batches:
        """As in `tf.distribute.Strategy`; first combines variables as `combine()`, because evaluation may follow."""
        if self.extended.sharding.combines:
            self.extended.combiner.refresh()
        return super().experimental_distribute_dataset(dataset, options)

    def dump_graph(self, path: str | pathlib.Path, function: str | None = None) -> None:
        """Writes the gates, buckets and updates of a traced training step as a picture in Graphviz DOT.

        Render it with `dot -Tsvg step.dot -o step.svg`. Priorities, sizes and slices are the current ones.

        Args:
            path: the file to write.
            function: name of the traced function, such as `"one_step_on_data"` of Keras' `fit`; default: the last
                one traced.

        Raises:
            ConfigError: no such function has been traced; the message lists those that were.
            TfpsError: no training step has been traced yet.
        """
        pathlib.Path(path).write_text(self.extended.picture(function).dot(), encoding="utf-8")

    @contextlib.contextmanager
    def trace(self, log_dir: str | pathlib.Path, name: str | None = None) -> Iterator[None]:
        """Records every slice on all workers and pservers during the block: `with strategy.trace("logs"):`.

        Written at the end, for TensorBoard's tabs "Parameter servers" and Profile, `tfps_trace` and Perfetto
        (docs/traceview.md). Rank 0 controls the recording; on other ranks this does nothing. The Profile tab includes
        a TensorFlow profile that was taken in the same directory within the block.

        Args:
            log_dir: the directory that `tensorboard --logdir` gets.
            name: name of the run; default: the current time.

        Raises:
            ConfigError: `name` is not a file name.
            TfpsError: another capture is already running, or nothing could be collected.
            OSError: the files cannot be written.
        """
        if self.rank != 0:
            yield
            return
        run = TraceRun(self._runtime, log_dir, name)
        try:
            yield
        finally:
            run.stop()
            run.write_profile()

    def close(self) -> None:
        """Leaves the job and stops all threads; later training raises. Called automatically when the process ends.

        Strategies of one process with the same pservers share a connection, which closes with the last of them.

        Raises:
            MismatchError: what was trained since the ranks compared it last differs between them.
        """
        if self._forget.detach():
            open_strategies.discard(self)
            failure = sys.exc_info()[1]  # in a `finally`: what ends the program
            try:
                if failure is None:
                    self._finish()
            finally:
                _disconnect(self._connection, self._user, failure)

    def _finish(self) -> None:
        """Compares what has been trained since ranks compared it last."""
        if self.extended.states is not None:
            self.extended.states.finish()


def _show_messages(ignored: Sequence[str]) -> None:
    """Logs events, such as the chosen sizes, to stderr, one line each, unless the program has set up logging.

    `ignored`: lines about variables that have no effect.
    """
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    for line in [*unknown_variables(), *ignored]:
        _warn_once(line)
    if clusters_by_itself() or tf.config.optimizer.get_jit():
        _warn_once(
            "TensorFlow chooses itself what XLA compiles (TF_XLA_FLAGS=--tf_xla_auto_jit, or "
            "tf.config.optimizer.set_jit): gradients leave only after the whole backward pass. Turn that off, and use "
            "model.compile(..., jit_compile=True), which compiles in parts (docs/xla.md)"
        )


@functools.cache  # per process
def _warn_once(line: str) -> None:
    logger.warning("tfps: %s", line)


class _Connection:
    """What strategies of this process with the same pservers share."""

    def __init__(self, cluster: Cluster, config: Config) -> None:
        self.cluster, self.config, recorder = cluster, config, Recorder()
        exchange: Exchange
        if cluster.pservers:
            about: dict[str, Argument] = {"rank": cluster.rank, "workers": cluster.workers, "job": cluster.job}
            if config.outlives_pservers:
                exchange = ElasticExchange(cluster.pservers, **about, config=config, recorder=recorder)
            else:
                exchange = Worker(cluster.pservers, **about, config=config, recorder=recorder)
        else:
            exchange = EmbeddedExchange(config, recorder)
        self.runtime = Runtime(exchange, recorder, config.step_timeout_s)
        # By strategy: what to end before the connection closes; guarded by _connecting.
        self.users: dict[int, contextlib.ExitStack] = {}


_open: list[_Connection] = []  # guarded by _connecting
_users = itertools.count()
_connecting = threading.RLock()  # reentrant: the garbage collector may finalize a strategy anywhere


def _connect(cluster: Cluster, config: Config, user: int) -> _Connection:
    """Connects, or reuses an earlier strategy's connection: a pserver knows each rank once."""
    with _connecting:
        for found in [each for each in _open if cluster.pservers and each.cluster == cluster]:
            # First: collecting the last other user would close the connection.
            found.users[user] = contextlib.ExitStack()
            if found.runtime.exchange.failure is None and found.config == config:
                return found
            del found.users[user]
            if found.runtime.exchange.failure is None:
                raise ConfigError(
                    f"this process has a strategy with the pservers {', '.join(cluster.pservers)} and other settings "
                    f"({found.config}, now {config}); close() it first, or give this one pservers of its own"
                )
    connection = _Connection(cluster, config)
    connection.users[user] = contextlib.ExitStack()
    try:
        share_random_states(connection.runtime, for_joiners=config.elastic)
        exchange = connection.runtime.exchange
        cache_apart(exchange.rank, exchange.view, changes=config.elastic)
    except BaseException:
        connection.runtime.close(drain=False)
        raise
    with _connecting:
        _open.append(connection)
    return connection


def _disconnect(connection: _Connection, user: int, failure: BaseException | None = None) -> None:
    """Removes a user, because of `failure` if there is one; the last one closes the connection."""
    with _connecting:
        ends = connection.users.pop(user, contextlib.ExitStack())
    ends.close()
    with _connecting:
        if connection.users:
            return
    _close(connection, failure, drain=True)


def _close(connection: _Connection, failure: BaseException | None, *, drain: bool) -> None:
    if failure is None and drain:
        _say_if_unused(connection.runtime)
    with _connecting, contextlib.suppress(ValueError):  # closed already
        _open.remove(connection)
    if failure is not None and connection.config.elastic and (error := for_others(failure)) is not None:
        connection.runtime.exchange.fail(error)
    connection.runtime.close(drain=drain, reason="" if failure is None else in_a_line(failure))


def _say_if_unused(runtime: Runtime) -> None:
    exchange, places = runtime.exchange, runtime.exchange.places
    if not runtime.used and exchange.failure is None and len(places) > 1 and places[0] == exchange.rank:
        logger.warning(
            "tfps: this job of %d workers ends without a single step under its strategy; what was trained, every "
            "worker has trained alone. Make or load models in `with strategy.scope():`",
            len(places),
        )


def _forget(connection: _Connection, user: int) -> None:
    """Finalizes a strategy that was garbage-collected without `close()`.

    Ranks collect at different times, so a connection with other workers stays open until the process ends; else ranks
    that have not collected theirs would wait for this one.
    """

    def end() -> None:
        if connection.runtime.exchange.view.workers == 1:
            _disconnect(connection, user)
        else:
            with _connecting:
                ends = connection.users[user].pop_all()
            ends.close()

    finalize(end)


def close_all(failure: BaseException | None = None) -> None:
    """Closes all strategies of this process, as its end does: for whatever runs a program in a process that goes on.

    Args:
        failure: what has ended the program. Ranks that wait for this one quote it; without a failure this one waits
            until they have what it has sent.
    """
    if failure is None:
        for strategy in sorted(open_strategies, key=lambda each: each._user):
            with contextlib.suppress(TfpsError):  # which has been logged
                strategy._finish()
    with _connecting:  # copies: the garbage collector may finalize a strategy meanwhile
        connections = [(each, [ends.pop_all() for ends in each.users.values()]) for each in _open]
    for connection, ends in connections:
        for end in ends:
            end.close()
        _close(connection, failure, drain=failure is None)


def _ended_by_exception() -> BaseException | None:
    """The exception that ends the interpreter, if one does: then nobody should wait for this worker.

    An interactive session shows exceptions and goes on.
    """
    goes_on = hasattr(sys, "ps1") or sys.flags.interactive
    return None if goes_on else getattr(sys, "last_value", None)


atexit.register(lambda: close_all(_ended_by_exception()))
