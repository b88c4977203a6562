"""TensorFlow's cache on disk of what XLA has compiled: who may set it, when, and that a second process uses it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import pytest
import tensorflow as tf

from tfps.errors import ConfigError
from tfps.graph.compile_cache import use_cache

FLAG = "--tf_xla_persistent_cache_directory="


@pytest.mark.parametrize(
    ("folder", "flags", "match"),
    [
        ("/dev/null/cache", "", r"a folder in which this process can write, got '/dev/null/cache': Not a directory; "),
        ("{}/a b", "", r"a path without spaces, as it becomes part of TF_XLA_FLAGS, got '\S+/a b'"),
        ("{}", "/etc/flags", r"names a file, got '/etc/flags': write --tf_xla_persistent_cache_directory=/\S+ into"),
        ("{}", f"--x {FLAG}/other --y", r"as a process has one such cache, got '/\S+' and '/other' there"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, folder: str, flags: str, match: str) -> None:
    environment = {"TF_XLA_FLAGS": flags}
    with pytest.raises(ConfigError, match=match):
        use_cache(folder.format(tmp_path), environment)
    assert environment == {"TF_XLA_FLAGS": flags}


def test_once_tensorflow_has_begun_the_same_folder_is_right_and_another_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tf.constant(1.0) + 1.0 == 2.0
    with caplog.at_level(logging.WARNING, "tfps"):
        use_cache(str(tmp_path), environment := {"TF_XLA_FLAGS": f"{FLAG}{tmp_path}"})
        assert not caplog.text
        use_cache(str(tmp_path / "new"), environment := {})
    assert environment == {}
    assert "has no effect: TensorFlow reads TF_XLA_FLAGS before its first op" in caplog.text


_PROGRAM = """
import os, sys, time
import keras, numpy as np, tfps
keras.utils.set_random_seed(1)
strategy = tfps.Strategy(config=tfps.Config(xla_part_bytes=4096))
with strategy.scope():
    layers = [keras.layers.Dense(32, "gelu", use_bias=False) for _ in range(4)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile("sgd", "mse", jit_compile=True)
for _ in range(5):
    model.train_on_batch(np.ones((8, 32), "float32"), np.ones((8, 32), "float32"))
model.get_weights()
print(len(strategy.extended.compiled.made[-1].parts), float(np.sum(model.get_weights()[0])), os.environ["TF_XLA_FLAGS"])
strategy.close()
"""


@pytest.mark.long
def test_a_second_process_reads_what_the_first_one_has_compiled(tmp_path: Path) -> None:
    folder, outputs, seen = tmp_path / "new" / "cache", list[list[str]](), list[dict[str, int]]()
    environment = {**os.environ, "TFPS_XLA_CACHE": str(folder), "TF_XLA_FLAGS": "--tf_xla_clustering_debug=false"}
    for _ in range(2):
        command = [sys.executable, "-c", _PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
        assert "has no effect" not in done.stderr
        outputs.append(done.stdout.split())
        seen.append({file.name: file.stat().st_mtime_ns for file in folder.iterdir()})
    first, second = outputs
    assert first == second
    assert first[2:] == ["--tf_xla_clustering_debug=false", f"{FLAG}{folder}"]
    assert len(seen[0]) >= int(first[0]) > 2
    assert seen[0] == seen[1], "nothing was compiled anew"
