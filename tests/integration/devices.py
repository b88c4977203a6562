"""Trains on two local devices (logical CPUs) and on one with the same global batch, and compares."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf
import training

import tfps


def main(*pservers: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    def trained(devices: list[str], **options: object) -> list[np.ndarray]:
        config = tfps.Config(slice_bytes=4096, window_bytes=8192)
        strategy = tfps.Strategy(list(pservers) or None, devices=devices, config=config)
        assert strategy.num_replicas_in_sync == len(devices)
        assert float(strategy.reduce("MEAN", 2.0, axis=None)) == 2.0
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, x, y = training.mlp()
            model.compile(
                keras.optimizers.Adam(**options), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            )
        model.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0)
        for variable in model.trainable_variables:
            replicas = [component.numpy().tobytes() for component in variable.value.values]
            assert len(replicas) == len(devices)
            assert len(set(replicas)) == 1, f"{variable.path}: the replicas differ"
        assert strategy.update_buckets() > 1
        weights = model.get_weights()
        strategy.close()
        return weights

    for options in ({}, {"gradient_accumulation_steps": 2}, {"use_ema": True}):
        one, two = trained(["CPU:0"], **options), trained(["CPU:0", "CPU:1"], **options)
        difference = max(np.abs(a - b).max() / np.abs(a).max() for a, b in zip(one, two, strict=True))
        assert difference < 1e-5, f"{options}: {difference}"
        print("devices agree", options, difference)


if __name__ == "__main__":
    main(*sys.argv[1:])
