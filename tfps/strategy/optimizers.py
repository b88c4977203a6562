"""What a strategy makes of optimizers: in its scope, with what its policy prepares, and in loops outside of `run`.

Custom training loops without `strategy.run`, as Keras' guides have them, run on every worker by itself, each with a
loss that is the whole of what that worker has read. Where such a loop applies gradients, outside of replica functions,
they are exchanged: each counts 1 / workers. If all workers read the same, as programs do that know nothing of workers,
the result is that of one process.

Tested in tests/strategy/test_compiling.py, tests/strategy/test_outside_run.py, tests/integration/programs_loops.py,
tests/programs/test_taught.py, tests/integration/test_local.py and tests/integration/test_async.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.patches import BaseStrategy, replaced, replica_context, scope_outside
from tfps.graph.shares import in_keras_step, keras_step, with_values
from tfps.keras_hooks.alone import say_if_applied_alone
from tfps.keras_hooks.checkpoint import carry_extra_states
from tfps.keras_hooks.hooks import for_models, replaces
from tfps.keras_hooks.keras_private import (
    Trainer,
    adopt_optimizer,
    batch_counter,
    in_symbolic_scope,
    strategy_of_optimizer,
    trained_variables,
)
from tfps.keras_hooks.variables import RemoteVariable, of_tensorflow
from tfps.keras_hooks.weighing import accumulating_replicas
from tfps.keras_hooks.xla import note_asked, say_if_lost
from tfps.types import Function, Model, Optimizer, Structure, Value, Variable
from tfps.updates import itself
from tfps.updates.itself import UpdatesItself
from tfps.updates.nonfinite import Guard
from tfps.updates.variables import GatedVariable, current_replica

_NONFINITE = "tests/updates/test_nonfinite.py"
_COMPILING, _TAUGHT = "tests/strategy/test_compiling.py", "tests/programs/test_taught.py"
_OPTIMIZER, _SCALING = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
_AROUND_OTHERS: tuple[type, ...] = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


@replaces(Trainer, "compile", _COMPILING)
@for_models
def _compile(original: Function, strategy: BaseStrategy, model: Model, *args: object, **options: object) -> object:
    """Enters the model's scope, and adopts metrics created outside.

    Programs compile a model again outside of its scope, as fine-tuning guides do.
    """
    for each in keras.tree.flatten((args, options)):
        if isinstance(each, keras.Metric):
            _adopt(each.variables, strategy)
    with strategy.scope():
        result = original(model, *args, **options)
    given = inspect.signature(original).bind(model, *args, **options)
    given.apply_defaults()
    asked = given.arguments.get("jit_compile")
    note_asked(model, asked)
    say_if_lost(strategy, model, asked, given.arguments.get("run_eagerly"))
    return result


# What programs have built optimizers for, with tables, which `apply` without variables stands for.
_built_for: weakref.WeakKeyDictionary[Optimizer, list[Variable]] = weakref.WeakKeyDictionary()
# The optimizer with a loss scale around another: it does not divide the gradients of tables, as Keras leaves alone what
# has `overwrite_with_gradient`.
_scaling: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()


@replaces(_OPTIMIZER, "build", _COMPILING)
def _build(original: Function, optimizer: Optimizer, variables: Sequence[Variable]) -> object:
    """Adopts an optimizer created outside, and prepares what its updates, gates and checkpoints need."""
    _built_for[optimizer] = list(variables)
    _check_scope(optimizer, itself.others(variables))
    _prepare(optimizer, itself.others(variables))
    return original(optimizer, variables)


@replaces(_SCALING, "build", _COMPILING, "as `Optimizer.build`")
def _build_with_scaling(original: Function, optimizer: Optimizer, variables: Sequence[Variable]) -> object:
    _scaling[optimizer.inner_optimizer] = weakref.ref(optimizer)
    with tf.init_scope(), _scope_of(variables):
        built = original(optimizer, variables)
        _prepare(optimizer, itself.others(variables))  # with Keras 3.8 it is not built as other optimizers are
    return built


def _check_scope(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Raises an error for variables without strategy beside some of tfps, or in an optimizer of tfps."""
    in_scope = [isinstance(of_tensorflow(each), tf.distribute.DistributedValues) for each in variables]
    of_tfps = isinstance(strategy_of_optimizer(optimizer), BaseStrategy) or bool(list(_gated(variables)))
    if all(in_scope) or not of_tfps:
        return
    variable = variables[in_scope.index(False)]
    raise UnsupportedError(
        f"optimizer {optimizer.name!r} trains variable {getattr(variable, 'path', variable.name)!r}, which was created "
        "outside of the scope of the strategy of this optimizer or of other variables; create models within `with "
        "strategy.scope():`, and those whose layers get their variables in the first call also build or call there "
        "(model.build(shape), or keras.Input as the first layer) before the loop"
    )


def _gated(variables: Iterable[Variable]) -> Iterator[GatedVariable]:
    """Those of TensorFlow that strategies of tfps have made."""
    return (each for each in map(of_tensorflow, variables) if isinstance(each, GatedVariable))


def _prepare(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    gated = list(_gated(variables))
    strategies = {each.distribute_strategy for each in gated}
    if len(strategies) == 1:
        (strategy,) = strategies
        adopt(optimizer, strategy)
        strategy.extended.policy.group_gates(gated)
        agreement = getattr(strategy.extended.staging, "agreement", None)
        if strategy.extended.changes and agreement is not None and optimizer.gradient_accumulation_steps:
            counter = of_tensorflow(batch_counter(optimizer))._values[0]
            agreement.accumulating[optimizer] = counter, optimizer.gradient_accumulation_steps
        if isinstance(optimizer, _SCALING):
            for variable in (optimizer.dynamic_scale, optimizer.step_counter):  # no statistics of rows
                variable.value.never_combined = True
    for each in strategies:  # which may refuse
        each.extended.policy.prepare(optimizer, variables, alone=len(strategies) == 1 and len(gated) == len(variables))
    if len(strategies) == 1:  # what a checkpoint has of it may be restored now
        carry_extra_states(optimizer, strategy, gated)


@replaces(_SCALING, "apply", _TAUGHT, "as `Optimizer.apply`")
@replaces(_OPTIMIZER, "apply", _TAUGHT)
def _apply(
    original: Function, optimizer: Optimizer, grads: Sequence[Value], trainable_variables: Structure = None
) -> object:
    """Exchanges gradients that are applied outside of replica functions, counts local steps, builds in the scope; and
    sends those of tables.
    """
    if trainable_variables is None and optimizer.built:
        trainable_variables = _built_for.get(optimizer)
    variables = None if trainable_variables is None else list(trainable_variables)
    if not isinstance(optimizer, _AROUND_OTHERS):
        original = functools.partial(_apply_apart, original)
    trained = trained_variables(optimizer) if variables is None else variables
    first = next(_gated(trained), None)
    strategy = strategy_of_optimizer(optimizer) if first is None else first.distribute_strategy
    if optimizer.built and isinstance(strategy, BaseStrategy):
        adopt(optimizer, strategy)  # Nadam's `build` makes one variable more where it is called
    context = tf.distribute.get_replica_context()
    outside = isinstance(strategy, BaseStrategy) and not in_symbolic_scope()
    outside = outside and (context is None or context.strategy is not strategy)
    if outside:
        _check_scope(optimizer, trained)
    if first is None or not isinstance(strategy, BaseStrategy):
        if not isinstance(strategy, BaseStrategy):
            say_if_applied_alone(optimizer)
        return original(optimizer, grads, variables)
    policy = strategy.extended.policy  # those without exchanges of gradients refuse by themselves
    if outside and strategy.extended._num_replicas_in_sync > 1 and policy.exchanges_gradients:
        policy.check_outside_run(len(strategy.extended.worker_devices))
        if not optimizer.built and variables is not None:
            _built_within(strategy.scope(), optimizer, variables)
        strategy.extended.agree_outside_run()
        # Each worker counts as one row, which tells how many there are where some may have been lost.
        one = (tf.ones([1]),) if strategy.extended.changes else ()
        with keras_step(trains=True):
            return strategy.run(lambda *_: _guarded(strategy, original, optimizer, grads, variables), args=one)
    with policy.step(optimizer, *_apart(grads, variables)):
        scales = isinstance(optimizer, _SCALING)  # which builds in the scope by itself
        if variables is not None and not optimizer.built and not scales:
            _built_within(_scope_of(variables), optimizer, variables)
        return _guarded(strategy, original, optimizer, grads, variables)


if hasattr(keras.optimizers, "MultiOptimizer"):
    _TOGETHER = "as `Optimizer.apply`: its optimizers skip a step together"
    replaces(keras.optimizers.MultiOptimizer, "apply", _NONFINITE, _TOGETHER)(_apply)


def _divided(scale: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.cast(values, tf.float32) / scale


def _apply_apart(
    original: Function, optimizer: Optimizer, grads: Sequence[Value], variables: Sequence[Variable] | None
) -> object:
    """Sends the gradients of tables, and has Keras' `original` apply the others."""
    tables = [each for each in variables or () if isinstance(each, UpdatesItself)]
    if not tables:
        return original(optimizer, grads, variables)
    variables = list(variables or ())  # some, as there are tables
    if optimizer.use_ema:
        raise UnsupportedError(
            f"optimizer {optimizer.name!r} keeps moving averages of variables (use_ema), which rows of tables have "
            f"not, as those of {tables[0].path!r}; use none in a model with tables"
        )
    if not optimizer.built:  # with tables, which later calls may name or not
        _built_within(contextlib.nullcontext(), optimizer, variables)
    for each in tables:
        each.declare(optimizer)  # which may refuse, before anything is updated
    around = _scaling.get(optimizer, lambda: None)()
    scales = [each for each in (optimizer.loss_scale_factor, around and around.dynamic_scale) if each is not None]
    for gradient, variable in zip(grads, variables, strict=True):
        if isinstance(variable, UpdatesItself) and gradient is not None:
            for scale in scales:
                gradient = with_values(gradient, functools.partial(_divided, tf.cast(scale, tf.float32)))
            variable.apply(gradient, optimizer)
    for own in {id(each.optimizer): each.optimizer for each in tables if each.optimizer is not None}.values():
        if own is not optimizer:
            batch_counter(own).assign_add(1)
    others, names = _apart(grads, variables)
    if any(each is not None for each in others):
        return original(optimizer, others, names)
    batch_counter(optimizer).assign_add(1)
    return None


def _apart(
    grads: Sequence[Value], variables: Sequence[Variable] | None
) -> tuple[Sequence[Value], Sequence[Variable] | None]:
    """Gradients and variables without those of tables."""
    if variables is None or len(itself.others(variables)) == len(variables):
        return grads, variables
    others = [pair for pair in zip(grads, variables, strict=True) if not isinstance(pair[1], UpdatesItself)]
    return [gradient for gradient, _ in others], [variable for _, variable in others]


class _Applying(threading.local):
    guarded = False  # whether this thread is in a call of `apply`; an optimizer may wrap another


_applying = _Applying()


def _guarded(
    strategy: BaseStrategy,
    original: Function,
    optimizer: Optimizer,
    grads: Sequence[Value],
    variables: Sequence[Variable] | None,
) -> object:
    """Calls Keras' `apply`, if not all gradients are applied only if these are finite."""
    guard: Guard | None = strategy.extended.guard
    if guard is None or _applying.guarded or in_symbolic_scope():
        return original(optimizer, grads, variables)
    with replaced(_applying, "guarded", True):
        if isinstance(optimizer, _SCALING):  # which skips steps by itself
            return original(optimizer, grads, variables)
        trained = map(of_tensorflow, trained_variables(optimizer) if variables is None else variables)
        sent, scale = list(grads), optimizer.loss_scale_factor
        if optimizer.global_clipnorm and not optimizer.gradient_accumulation_steps:  # by a norm that may overflow
            sent = _changed(sent, lambda values: values if scale is None else values / scale)
            sent = optimizer._clip_gradients(sent)
        known = [each for each in zip(grads, sent, trained, strict=False) if each[0] is not None]
        if known:
            pairs = [(given, clipped) for given, clipped, _ in known]
            guard.run(lambda: original(optimizer, grads, variables), pairs, [each for *_, each in known])
            return None
        return original(optimizer, grads, variables)


@replaces(_OPTIMIZER, "_clip_gradients", "tests/integration/test_local.py")
def _clip(original: Function, optimizer: Optimizer, grads: list[Value]) -> list[Value]:
    """Limits are of a replica's own gradient, not of its part: where it accumulates, and where workers step apart.

    In replica functions of `strategy.run`, Keras divides a loss by the number of replicas of all workers and clips what
    that gives. In these modes a gradient is multiplied by the number of workers only after it: limits would be so many
    times too loose.
    """
    factor: tf.Tensor | int = 1
    context = replica_context()
    if (optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue) and context is not None:
        policy = context.strategy.extended.policy
        factor = accumulating_replicas(optimizer) if in_keras_step() else policy.gradient_factor
    if isinstance(factor, int) and factor == 1:
        return original(optimizer, grads)
    clipped = original(optimizer, _changed(grads, lambda values: values * tf.cast(factor, values.dtype)))
    return _changed(clipped, lambda values: values / tf.cast(factor, values.dtype))


def _changed(gradients: Sequence[Value], change: Callable[[tf.Tensor], tf.Tensor]) -> list[Value]:
    """`gradients`, some of which may be None or IndexedSlices, with changed values."""
    return [None if each is None else with_values(each, change) for each in gradients]


def _scope_of(variables: Sequence[Variable]) -> contextlib.AbstractContextManager[object]:
    """Returns the scope to create slots in: that of `variables` for a program outside of any, as in an eager loop."""
    strategies = {each.distribute_strategy for each in _gated(variables)}
    return scope_outside(strategies.pop()) if len(strategies) == 1 else contextlib.nullcontext()


def _built_within(
    scope: contextlib.AbstractContextManager[object], optimizer: Optimizer, variables: Sequence[Variable]
) -> None:
    """Builds `optimizer` outside of a step that is being traced: Adafactor makes variables of constants."""
    with tf.init_scope(), scope, keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)


def _distributed(variable: Variable) -> bool:
    return isinstance(variable, RemoteVariable) or isinstance(variable.value, tf.distribute.DistributedValues)


def adopt(optimizer: Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Makes an optimizer that was created outside of the scope of `strategy` one of it."""
    if not all(map(_distributed, optimizer.variables)):
        _adopt(optimizer.variables, strategy)
        adopt_optimizer(optimizer, strategy)


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
