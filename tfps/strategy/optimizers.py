"""What a strategy makes of optimizers: in its scope, with what its policy prepares, and in loops outside of `run`.

`Model.compile` enters its model's scope automatically: programs compile a model again outside of it, as fine-tuning
guides do. Optimizers and metrics created outside get variables of the strategy as soon as it is known: an optimizer
when it is built for variables, a metric when it is compiled.

Custom training loops without `strategy.run`, as Keras' guides have them, run on every worker by itself, each with a
loss that is the whole of what that worker has read. Where such a loop applies gradients, outside of replica functions,
they are exchanged: each counts 1 / workers. If all workers read the same, as programs do that know nothing of workers,
the result is that of one process.

Tested in tests/strategy/test_compiling.py, tests/strategy/test_outside_run.py, tests/integration/programs_loops.py,
tests/programs/test_taught.py, tests/integration/test_local.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.patches import BaseStrategy, Patch, for_models, replica_context, scope_outside
from tfps.graph.shares import in_keras_step, keras_step, with_values
from tfps.keras_hooks.checkpoint import carry_extra_states
from tfps.keras_hooks.keras_private import (
    Trainer,
    adopt_optimizer,
    in_symbolic_scope,
    strategy_of_optimizer,
    trained_variables,
)
from tfps.keras_hooks.variables import RemoteVariable, of_tensorflow
from tfps.types import Function, Model, Optimizer, Value, Variable
from tfps.updates.variables import GatedVariable, current_replica


@for_models
def _compile(original: Function, strategy: BaseStrategy, model: Model, *arguments: object, **options: object) -> object:
    for each in keras.tree.flatten((arguments, options)):
        if isinstance(each, keras.Metric):
            _adopt(each.variables, strategy)
    with strategy.scope():
        return original(model, *arguments, **options)


def _build(original: Function) -> Function:
    def build(self: Optimizer, variables: Sequence[Variable]) -> object:
        _prepare(self, variables)
        return original(self, variables)

    return build


def _build_with_scaling(original: Function) -> Function:
    def build(self: Optimizer, variables: Sequence[Variable]) -> object:
        with _scope_of(variables):
            built = original(self, variables)
            _prepare(self, variables)  # with Keras 3.8 it is not built as other optimizers are
        return built

    return build


def _prepare(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    updated = list(map(of_tensorflow, variables))
    gated = [each for each in updated if isinstance(each, GatedVariable)]
    strategies = {each.distribute_strategy for each in gated}
    if len(strategies) == 1:
        (strategy,) = strategies
        if not all(map(_distributed, optimizer.variables)):
            _adopt(optimizer.variables, strategy)
            adopt_optimizer(optimizer, strategy)
        strategy.extended.policy.group_gates(gated)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            for variable in (optimizer.dynamic_scale, optimizer.step_counter):  # no statistics of rows
                variable.value.never_combined = True
    for each in strategies:  # which may refuse
        each.extended.policy.prepare(optimizer, variables, alone=len(strategies) == 1 and len(gated) == len(updated))
    if len(strategies) == 1:  # what a checkpoint has of it may be restored now
        carry_extra_states(optimizer, strategy, gated)


def _apply(original: Function) -> Function:
    def apply(self: Optimizer, grads: Sequence[Value], trainable_variables: Iterable[Variable] | None = None) -> object:
        variables = None if trainable_variables is None else list(trainable_variables)
        trained = trained_variables(self) if variables is None else variables
        gated = (each for each in map(of_tensorflow, trained) if isinstance(each, GatedVariable))
        first = next(gated, None)
        strategy = strategy_of_optimizer(self) if first is None else first.distribute_strategy
        outside = isinstance(strategy, BaseStrategy) and _is_outside_run(strategy)
        if outside:
            _check_created_in_scope(self, trained)
        if first is None or not isinstance(strategy, BaseStrategy):
            return original(self, grads, variables)
        policy = strategy.extended.policy  # those without exchanges of gradients refuse by themselves
        if outside and strategy.extended._num_replicas_in_sync > 1 and policy.exchanges_gradients:
            policy.check_outside_run(len(strategy.extended.worker_devices))
            if not self.built and variables is not None:
                with strategy.scope():
                    self.build(variables)
            strategy.extended.agree_outside_run()
            with keras_step(trains=True):
                return strategy.run(lambda: original(self, grads, variables))
        with policy.step(self, grads, variables):
            scales = isinstance(self, keras.optimizers.LossScaleOptimizer)  # which builds in the scope by itself
            if variables is not None and not self.built and not scales:
                with _scope_of(variables), keras.name_scope(self.name, caller=self):
                    self.build(variables)
            return original(self, grads, variables)

    return apply


def _is_outside_run(strategy: BaseStrategy) -> bool:
    """Whether what this thread applies now is outside of replica functions of `strategy`."""
    context = tf.distribute.get_replica_context()
    return not in_symbolic_scope() and (context is None or context.strategy is not strategy)


def _check_created_in_scope(optimizer: Optimizer, trained: Iterable[Variable]) -> None:
    """Checks what a loop outside of `run` trains."""
    for variable in trained:
        if not isinstance(of_tensorflow(variable), tf.distribute.DistributedValues):
            raise UnsupportedError(
                f"optimizer {optimizer.name!r} trains variable {getattr(variable, 'path', variable.name)!r}, which was "
                "created outside of the scope of the strategy of this optimizer or of other variables; create models "
                "within `with strategy.scope():`, and those whose layers get their variables in the first call also "
                "build or call there (model.build(shape), or keras.Input as the first layer) before the loop"
            )


def _clip(original: Function) -> Function:
    """Clips a worker's own gradient where workers do not step together (docs/modes.md).

    In replica functions of `strategy.run`, Keras divides a loss by the number of replicas of all workers and clips what
    that gives. In these modes a gradient is multiplied by the number of workers only after it: limits would be so many
    times too loose.
    """

    def clip(self: Optimizer, grads: list[Value]) -> list[Value]:
        factor, context = 1, replica_context()
        if (self.clipnorm or self.global_clipnorm or self.clipvalue) and context is not None and not in_keras_step():
            factor = context.strategy.extended.policy.gradient_factor
        if factor == 1:
            return original(self, grads)
        clipped = original(self, _changed(grads, lambda values: values * tf.cast(factor, values.dtype)))
        return _changed(clipped, lambda values: values / tf.cast(factor, values.dtype))

    return clip


def _changed(gradients: Sequence[Value], change: Callable[[tf.Tensor], tf.Tensor]) -> list[Value]:
    """`gradients`, some of which may be None or IndexedSlices, with changed values."""
    return [None if each is None else with_values(each, change) for each in gradients]


def _scope_of(variables: Sequence[Variable]) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to create slots in: that of `variables` for a program outside of any, as in an eager loop."""
    gated = [each for each in map(of_tensorflow, variables) if isinstance(each, GatedVariable)]
    strategies = {each.distribute_strategy for each in gated}
    return scope_outside(strategies.pop()) if len(strategies) == 1 else contextlib.nullcontext()


def _distributed(variable: Variable) -> bool:
    return isinstance(variable, RemoteVariable) or isinstance(variable.value, tf.distribute.DistributedValues)


def _adopt(variables: Iterable[Variable], strategy: tf.distribute.Strategy) -> None:
    """Recreates those of `variables` that belong to no strategy under `strategy`; they keep their values."""
    with tf.init_scope(), contextlib.ExitStack() as scope:
        if current_replica(strategy) is None:
            scope.enter_context(strategy.scope())
        for variable in variables:
            if not _distributed(variable):
                value = variable.numpy()
                variable._initialize(value)
                variable.assign(value)  # else each replica of a SUM variable would hold the whole


_COMPILING, _TAUGHT = "tests/strategy/test_compiling.py", "tests/programs/test_taught.py"
_OPTIMIZER, _SCALING = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
PATCHES = (
    Patch(Trainer, "compile", _compile, "enters the model's scope, and adopts metrics created outside", _COMPILING),
    Patch(
        _OPTIMIZER,
        "build",
        _build,
        "adopts an optimizer created outside, and prepares what its updates, gates and checkpoints need",
        _COMPILING,
    ),
    Patch(_SCALING, "build", _build_with_scaling, "as `Optimizer.build`", _COMPILING),
    Patch(
        _OPTIMIZER,
        "apply",
        _apply,
        "exchanges gradients applied outside of replica functions, counts a step where workers train alone, and builds "
        "in the scope",
        _TAUGHT,
    ),
    Patch(_SCALING, "apply", _apply, "as `Optimizer.apply`", _TAUGHT),
    Patch(
        _OPTIMIZER,
        "_clip_gradients",
        _clip,
        "limits are of a worker's own gradient where workers do not step together",
        "tests/integration/test_local.py",
    ),
)
