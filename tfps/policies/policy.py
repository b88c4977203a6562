"""When workers exchange what, one object per mode: `Policy` is mode "sync", others override what they do otherwise.

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
from tfps.updates.reductions import Reductions
from tfps.updates.variables import GatedVariable

_SERVER = "update='server'"


class Policy:
    """Gradients of every step are summed (mode "sync"). Used by the threads that trace or run eagerly."""

    setting = "mode='sync'"  # what asks for it, for messages
    together = True  # whether all workers take steps, batches and decisions together, so that they can be compared
    exchanges_gradients = True  # in each step
    # Whether each batch of training is one worker's, instead of parts of each batch for all. Then it has methods for
    # epochs of `fit`, see `Asynchronous`.
    hands_out = False
    gets_changes = True  # whether pservers that update variables with a codec reply with changes, the same for all

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime, self._config = runtime, config
        self.remote_parameters = config.update == "server"  # whether pservers keep parameters
        self._strategy: tf.distribute.Strategy  # see attach

    def attach(self, strategy: tf.distribute.Strategy) -> None:
        """Takes the strategy that it works for; called once, when that has made its parts."""
        self._strategy = strategy

    # Steps.

    def reductions(self) -> Reductions:
        estimates = not (self.together and self.exchanges_gradients)
        return Reductions(self._runtime, estimates=estimates, changes=self._config.elastic)

    def staging_depth(self, requested: int) -> int:
        """Returns how many batches are staged ahead: workers that meet in steps must agree on where data ends."""
        return max(requested, int(self._runtime.exchange.view.workers > 1 and self.exchanges_gradients))

    @property
    def gradient_factor(self) -> int:
        """By how much an optimizer's gradient of a replica function is multiplied after it was clipped."""
        return 1

    def stepping(self) -> Stepping:
        """Returns how steps follow each other, for reports."""
        return Stepping(waits=self._runtime.exchange.view.workers > 1)

    # Optimizers and variables.

    def group_gates(self, variables: Sequence[GatedVariable]) -> None:
        self._strategy.extended.scheduler.group_gates(variables)

    def prepare(self, optimizer: Optimizer, variables: Sequence[Variable], *, alone: bool) -> None:
        """Prepares the updates of `variables`, of TensorFlow or Keras, which `optimizer` is built for.

        `alone`: whether all of them are trainable ones of this strategy.
        """
        if self.remote_parameters:
            check_alone(alone, _SERVER, "use update='worker' (tfps.Config)")
            update_on_pservers(optimizer, variables, self._strategy)

    def note_remote(self, variable: GatedVariable) -> None:
        """Notes a variable that pservers update."""

    def note_assigned(self, variable: GatedVariable) -> None:
        """Notes that the program has assigned `variable`."""

    def check_outside_run(self, devices: int) -> None:
        """Checks that gradients may be applied outside of replica functions; `devices`: of this one of the workers."""
        if self.together and not self.remote_parameters and devices == 1:
            return
        reason = f"this worker has {devices} devices" if devices > 1 else _SERVER if self.together else self.setting
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

    def fitting(self) -> contextlib.AbstractContextManager[None]:
        """In the block, `fit` runs."""
        return contextlib.nullcontext()

    def begin_steps(self) -> None:
        """Does what ranks do together before the steps of an epoch of `fit`, or of `evaluate`."""

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

    def let_one_save(self) -> None:
        """Lets a rank save all of the training's state alone from here on; every rank calls it."""
        self._strategy.extended.compressing.collect()

    @property
    def state(self) -> str | None:
        """The state of the job that this worker could save now; None: all save the same. Files of one are rank 0's."""
        return None

    def check_saves_now(self, what: str) -> None:
        """Checks that `what`, a callback, may save at a batch: not if the ranks are at different ones."""

    def check_save_freq(self, what: str, frequency: object) -> None:
        """Checks that `what`, a callback, may save this often, with several workers."""

    def checkpoint_state(self, optimizer: Optimizer) -> ExtraState | None:
        """Returns what checkpoints of `optimizer` have to have beside what Keras has in them, if anything."""
        return None


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


def check_alone(alone: bool, setting: str, instead: str) -> None:
    """Checks that all variables of an optimizer are trainable ones of one strategy, as `alone` says.

    Raises:
        UnsupportedError: they are not; says to do `instead`.
    """
    if not alone:
        raise UnsupportedError(
            f"with {setting} all variables of an optimizer must be trainable ones of one strategy; build the model "
            f"within its scope, or {instead}"
        )
