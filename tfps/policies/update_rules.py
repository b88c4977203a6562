"""Reads Keras' optimizers: their rule for pservers, its constants, and the numbers of a step.

Numbers are computed with the same operations as in each optimizer's `update_step`, for the same bits.

Tested in tests/integration/test_remote_updates.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfps.keras_hooks.keras_private import product_of_momentums
from tfps.types import Optimizer, Value

ops = keras.ops


@dataclass(frozen=True)
class Reading:
    """How pservers update for one class of Keras' optimizers.

    Args:
        rule: as in `tfps.exchange.update_spec`.
        constants: name of a constant -> the optimizer's attribute.
        numbers: returns a step's numbers from the optimizer and the learning rate, float32 scalars.
    """

    rule: str
    constants: dict[str, str]
    numbers: Callable[[Optimizer, tf.Tensor], list[Value]] = lambda optimizer, lr: []

    @property
    def linear(self) -> bool:
        """Whether rows of a sparse gradient may be added up first; other rules see each row by itself in Keras."""
        return self.rule in ("sgd", "lion")


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _power_left(optimizer: Optimizer, beta: float) -> Value:
    """1 - beta ** (iterations + 1)"""
    local_step = ops.cast(optimizer.iterations + 1, "float32")
    return 1 - ops.power(ops.cast(beta, "float32"), local_step)


def _of_adam(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    local_step = ops.cast(optimizer.iterations + 1, "float32")
    beta_1_power = ops.power(ops.cast(optimizer.beta_1, "float32"), local_step)
    beta_2_power = ops.power(ops.cast(optimizer.beta_2, "float32"), local_step)
    return [lr * ops.sqrt(1 - beta_2_power) / (1 - beta_1_power)]


def _of_nadam(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    local_step = ops.cast(optimizer.iterations + 1, "float32")
    next_step = ops.cast(optimizer.iterations + 2, "float32")
    decay, beta_1 = ops.cast(0.96, "float32"), ops.cast(optimizer.beta_1, "float32")
    u_t = beta_1 * (1.0 - 0.5 * (ops.power(decay, local_step)))
    u_t_1 = beta_1 * (1.0 - 0.5 * (ops.power(decay, next_step)))
    u_product_t = ops.cast(product_of_momentums(optimizer), "float32")
    return [u_t_1, 1 - u_product_t * u_t_1, 1 - u_t, 1 - u_product_t, _power_left(optimizer, optimizer.beta_2)]


def _of_ftrl(optimizer: Optimizer, lr: tf.Tensor) -> list[Value]:
    return [2 * (optimizer.l2_regularization_strength + optimizer.beta / (2.0 * lr))]


_ADAM = Reading("adam", _same("beta_1", "beta_2", "epsilon"), _of_adam)
READINGS: dict[type[Optimizer], Reading] = {
    keras.optimizers.SGD: Reading("sgd", _same("momentum", "nesterov")),
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.Adamax: Reading(
        "adamax", _same("beta_1", "beta_2", "epsilon"), lambda optimizer, lr: [_power_left(optimizer, optimizer.beta_1)]
    ),
    keras.optimizers.Nadam: Reading("nadam", _same("beta_1", "beta_2", "epsilon"), _of_nadam),
    keras.optimizers.RMSprop: Reading("rmsprop", _same("rho", "momentum", "epsilon")),
    keras.optimizers.Adagrad: Reading("adagrad", _same("epsilon")),
    keras.optimizers.Adadelta: Reading("adadelta", _same("rho", "epsilon")),
    keras.optimizers.Ftrl: Reading(
        "ftrl",
        {"l1": "l1_regularization_strength", "l2_shrinkage": "l2_shrinkage_regularization_strength"},
        _of_ftrl,
    ),
    keras.optimizers.Lion: Reading("lion", _same("beta_1", "beta_2")),
}


def step_numbers(optimizer: Optimizer, reading: Reading, learning_rate: Value) -> tf.Tensor:
    """The numbers of a step, in the order of `UpdateSpec.numbers`, float64 [count]; computed where this is called."""
    lr = ops.cast(learning_rate, "float32")
    found = [lr, *reading.numbers(optimizer, lr)]
    if optimizer.use_ema:
        begun = ops.cast(ops.not_equal(optimizer.iterations, 0), "float32")
        found.append(ops.multiply(begun, optimizer.ema_momentum))
        every = optimizer.ema_overwrite_frequency
        found.append(ops.equal((optimizer.iterations + 1) % every, 0) if every else False)
    iteration = tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.float64)
    return tf.stack([iteration, *(tf.cast(tf.convert_to_tensor(each), tf.float64) for each in found)])
