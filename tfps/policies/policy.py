"""When workers exchange what, one object per mode; and where an update runs, one object per place.

`Policy` is mode "sync": the gradients of every step are summed, and all workers take each step together. Another mode
is one subclass in one module, which overrides what it does otherwise. Nothing outside of this folder asks for the mode.

Tested in tests/policies/test_policy.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tfps.config import Config
from tfps.errors import UnsupportedError
from tfps.keras_hooks.checkpoint import ExtraState
from tfps.policies.remote_optimizers import update_on_pservers
from tfps.runtime.report import Stepping
from tfps.runtime.runtime import Runtime
from tfps.types import Model, Optimizer, Structure, Variable
from tfps.updates.initial_values import InitialValues
from tfps.updates.reductions import Reductions
from tfps.updates.scheduler import UpdateScheduler
from tfps.updates.variables import GatedVariable

DEFAULT = "mode='sync' (tfps.Config, the default)"


class WorkerUpdates:
    """Workers update variables, each the same."""

    setting = "update='worker'"
    remote = False  # whether pservers keep parameters

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> None:
        """Prepares the updates of `variables`, of TensorFlow or Keras, which `optimizer` is built for."""


class PserverUpdates(WorkerUpdates):
    """Pservers update variables, and keep the optimizers' slots."""

    setting = "update='server'"
    remote = True

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], strategy: tf.distribute.Strategy) -> None:
        update_on_pservers(optimizer, variables, strategy)


class Policy:
    """Gradients of every step are summed, and all workers take each step together (mode "sync").

    Used by the threads that trace or run eagerly.

    Attributes:
        setting: what asks for it, for messages.
        together: whether all workers take their steps, batches and decisions together, so that they can be compared.
        exchanges_gradients: whether each step exchanges its gradients.
        hands_out: whether each batch of training is one worker's, instead of parts of each batch for all. Then it has
            methods for epochs of `fit`; see `Asynchronous`.
        keeps_global: whether there are global parameters beside the workers' own.
        gets_changes: whether pservers that update variables with a codec reply with changes, the same for all.
    """

    setting = "mode='sync'"
    together = True
    exchanges_gradients = True
    hands_out = False
    keeps_global = False
    gets_changes = True

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime, self._config = runtime, config
        self.updates = PserverUpdates() if config.update == "server" else WorkerUpdates()
        self._strategy: tf.distribute.Strategy | None = None
        self._scheduler: UpdateScheduler  # see attach

    def attach(
        self, strategy: tf.distribute.Strategy, scheduler: UpdateScheduler, initial_values: InitialValues
    ) -> None:
        """Takes what it works with; called once, when the strategy has made it."""
        self._strategy, self._scheduler = strategy, scheduler

    # Steps.

    def reductions(self) -> Reductions:
        """Returns what sums values over the workers."""
        return Reductions(self._runtime)

    def staging_depth(self, requested: int) -> int:
        """Returns how many batches are staged ahead, 0: none; workers must agree on where data ends."""
        return max(requested, int(self._runtime.exchange.view.workers > 1))

    @property
    def remote_parameters(self) -> bool:
        """Whether pservers keep parameters."""
        return self.updates.remote

    @property
    def gradient_factor(self) -> int:
        """By how much an optimizer's gradient of a replica function is multiplied after it was clipped."""
        return 1

    def stepping(self) -> Stepping:
        """Returns how steps follow each other, for reports."""
        return Stepping(waits=self._runtime.exchange.view.workers > 1)

    # Optimizers and variables.

    def group_gates(self, variables: Sequence[GatedVariable]) -> None:
        """Lets small ones of an optimizer's `variables` share gates."""
        self._scheduler.group_gates(variables)

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], *, alone: bool) -> None:
        """Prepares the updates of `variables`, of TensorFlow or Keras, which `optimizer` is built for.

        Args:
            alone: whether all of them are trainable ones of this strategy.

        Raises:
            UnsupportedError: something of them forbids it.
        """
        if self.updates.remote:
            self._check_alone(alone, self.updates.setting, "update='worker' (tfps.Config)")
        self.updates.prepare(optimizer, variables, self._strategy)

    def note_remote(self, variable: GatedVariable) -> None:
        """Notes a variable that pservers update."""

    def note_assigned(self, variable: GatedVariable) -> None:
        """Notes that the program has assigned `variable`."""

    def check_outside_run(self, devices: int) -> None:
        """Checks that gradients may be applied outside of replica functions, with several workers.

        Args:
            devices: of this worker.

        Raises:
            UnsupportedError: they may not.
        """
        if self.together and not self.updates.remote and devices == 1:
            return
        reason = f"this worker has {devices} devices" if devices > 1 else self.setting
        if self.together and devices == 1:
            reason = self.updates.setting
        raise UnsupportedError(
            "with several workers a loop may apply gradients outside of replica functions only with one device per "
            f"worker, mode='sync' and update='worker', got {reason}; call the optimizer's `apply` in a function that "
            "strategy.run runs"
        )

    def step(
        self, optimizer: Optimizer, gradients: Structure, variables: Sequence[Variable] | None
    ) -> contextlib.AbstractContextManager[None]:
        """In the block `optimizer` applies `gradients`, of `variables` or, if None, of those that it is built for."""
        return contextlib.nullcontext()

    # Epochs.

    def end_epoch(self, model: Model) -> None:
        """Does what ends an epoch of `fit`, or a call of `evaluate`, before anything else that ranks do together."""

    def begin_evaluation(self) -> None:
        """Does what ranks do together before a call of `evaluate` that is not within `fit`."""

    def end_training(self) -> None:
        """Does what ends `fit`, before callbacks are told."""

    def synchronize(self) -> None:
        """See `Strategy.synchronize`."""

    def global_parameters(self) -> contextlib.AbstractContextManager[None]:
        """In the block, variables have the values that are evaluated and saved."""
        return contextlib.nullcontext()

    # Saving.

    @property
    def state(self) -> str | None:
        """The state of the job that this worker could save now, as a text; None: all save the same.

        Where workers are at different steps, files of one state are rank 0's.
        """
        return None

    def check_saves_now(self, what: str) -> None:
        """Checks that `what`, a callback, may save at a batch.

        Raises:
            UnsupportedError: the ranks are at different batches.
        """

    def check_save_freq(self, what: str, frequency: object) -> None:
        """Checks that `what`, a callback, may save this often, with several workers.

        Raises:
            UnsupportedError: the ranks would be at different batches.
        """

    def checkpoint_state(self, optimizer: Optimizer) -> ExtraState | None:
        """Returns what checkpoints of `optimizer` have to have beside what Keras has in them, if anything."""
        return None

    @staticmethod
    def _check_alone(alone: bool, setting: str, instead: str) -> None:
        if not alone:
            raise UnsupportedError(
                f"with {setting} all variables of an optimizer must be trainable ones of one strategy; build the model "
                f"within its scope, or use {instead}"
            )


class Independent(Policy):
    """Workers take their steps by themselves, unless there is one only."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        super().__init__(runtime, config)
        self.together = runtime.exchange.view.workers == 1
        self._barriers = 0  # how often all have been at one state

    @property
    def gradient_factor(self) -> int:
        return int(self._runtime.exchange.view.workers)

    @property
    def state(self) -> str | None:
        return str(self._barriers)
