"""Worker: does what `tf.distribute` documents of a strategy, eagerly and in tf.function, and checks every result.

api.py DEVICES      on so many logical CPU devices; all workers have the same number
"""

from __future__ import annotations

import sys

import api_values
import api_variables
import tensorflow as tf

import tfps


def main(devices: str) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(devices))
    config = tfps.Config(step_timeout_s=60, slice_bytes=4096, window_bytes=8192)
    strategy = tfps.Strategy(devices=[f"CPU:{each}" for each in range(int(devices))], config=config)
    for each in [*api_values.CHECKS, *api_variables.CHECKS]:
        try:
            each(strategy)
        except BaseException:
            print("FAILED:", each.__name__, flush=True)
            raise
        print("passed:", each.__name__, flush=True)
    strategy.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
