"""The picture of a step: what is found in real traced functions, and the DOT that it becomes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import training

import tfps
from tfps.graph import tf_private
from tfps.updates.graph_view import Picture, Read, Sent

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz' dot is not installed")
# The variables of training.mlp in forward order, without what Keras numbers per process.
FORWARD = ["dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias", "dense_2/kernel", "dense_2/bias"]


def drawn(
    strategy: tfps.Strategy, optimizer: Callable[[], keras.optimizers.Optimizer], build: training.Build = training.mlp
) -> Picture:
    """The picture of one `fit`."""
    keras.backend.clear_session()  # names of layers begin anew
    training.train(strategy, optimizer, build, epochs=1)
    picture: Picture = strategy.extended.picture(None)
    return picture


def names(variables: Iterable[str]) -> list[str]:
    return [name.partition("/")[2] for name in variables]


def drawing(text: str) -> str:
    """What Graphviz makes of it, as SVG."""
    return subprocess.run(["dot", "-Tsvg"], input=text, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_picture_of_a_fit_has_every_read_and_every_bucket_and_nothing_waits(remote: tfps.Strategy) -> None:
    with pytest.raises(tfps.TfpsError, match="nothing to draw before the first training step"):
        remote.extended.picture(None)
    picture = drawn(remote, keras.optimizers.Adam)
    assert (picture.function, picture.workers) == ("one_step_on_data", 1)
    assert names(read.variable for read in picture.reads) == FORWARD
    assert len(picture.sent) == remote._runtime.update_buckets() > 2
    by_priority = sorted(picture.sent, key=lambda each: each.priority)
    assert [names(each.variables) for each in by_priority] == [
        ["dense/kernel"],
        ["dense/bias", "dense_1/bias", "dense_2/bias"],
        ["dense_1/kernel"],
        ["dense_2/kernel"],
    ]
    assert sum(each.nbytes for each in picture.sent) == 4 * (64 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10)
    assert [len(each.owners) for each in by_priority if each.nbytes == 64 * 32 * 4] == [8]  # slices of 1 KiB
    assert {owner for each in picture.sent for owner in each.owners} == {0, 1}
    assert all("learning_rate" in each.kept for each in picture.sent)
    assert not any(read.after for read in picture.reads)
    assert not any(each.after for each in picture.sent), "sends must not wait for each other"


def test_sends_that_wait_for_each_other_are_seen(remote: tfps.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tf_private.set_read_only_inputs
    # Without this attribute TensorFlow orders all sends, which share a queue, as they were traced.
    monkeypatch.setattr(tf_private, "set_read_only_inputs", lambda call, which: None if which else real(call, which))
    picture = drawn(remote, keras.optimizers.SGD)
    chained = [each for each in picture.sent if each.after]
    assert len(chained) == len(picture.sent) - 1
    assert picture.dot().count('label="waits for"') == len(chained)


def test_an_update_inside_the_step_shows_as_pulls(remote: tfps.Strategy) -> None:
    picture = drawn(remote, keras.optimizers.Adafactor)
    pulls = [each for each in picture.sent if not each.variables]
    assert [pull.nbytes for pull in pulls] == [4 * 64 * 32, 4 * 32 * 32, 4 * 32 * 10]  # kernels: factored moments
    assert "used in this step" in picture.dot()


def test_a_branch_shows_with_the_reads_around_it_and_functions_are_chosen_by_name(
    remote: tfps.Strategy, tmp_path: Path
) -> None:
    picture = drawn(remote, lambda: keras.optimizers.Adam(gradient_accumulation_steps=2))
    assert names(read.variable for read in picture.reads)[: len(FORWARD)] == FORWARD
    assert names(name for each in picture.sent for name in each.variables)
    with pytest.raises(tfps.ConfigError, match=f"function must be one of .*'{picture.function}'.*, got 'nothing'"):
        remote.dump_graph(tmp_path / "step.dot", "nothing")
    remote.dump_graph(tmp_path / "step.dot", picture.function)
    assert (tmp_path / "step.dot").read_text() == picture.dot()


def test_a_variable_that_is_read_after_its_update_in_the_same_step_shows_that_it_waits(remote: tfps.Strategy) -> None:
    picture = drawn(remote, lambda: keras.optimizers.SGD(use_ema=True))
    again = [read for read in picture.reads if read.after]
    assert again
    assert "again: " in picture.dot()


def test_sparse_gradients_and_a_strategy_without_pservers_have_pictures_too() -> None:
    strategy = tfps.Strategy()
    picture = drawn(strategy, keras.optimizers.Adam, training.embedding_sparse)
    strategy.close()
    assert sorted(each.kind for each in picture.sent) == ["gather", "sum"]
    assert not any(each.owners for each in picture.sent)
    assert "send rows" in picture.dot()


ODD = Picture(
    function='a "quoted\\ name',
    workers=4,
    reads=[Read("k0", "model/w"), Read("k1", "model/b"), Read("k2", "model/w", ("s1",))],
    sent=[
        Sent("s0", "b", ["model/b"], "sum", 7, 5 * 2**20, owners=[0, 1, 1]),
        Sent("s1", "w", ["model/w"], "sum", 0, 1020, ["rate", "step", "x", "y"]),
        Sent("s2", 'tensor "odd"', [], "sum", 9, 4, after=["s0"]),
    ],
)


def test_the_most_urgent_send_is_on_top_and_darkest() -> None:
    lines = ODD.dot().splitlines()
    sends = [line for line in lines if line.strip().startswith("send")]
    assert ["priority 0" in sends[0], "priority 7" in sends[1], "priority 9" in sends[2]] == [True] * 3
    assert 'fillcolor="#08519c", fontcolor=white' in sends[0]
    assert "keep 4 values" in sends[0]
    assert "3 slices on 2 pservers" in sends[1]
    assert "sum of 4 workers" in ODD.dot()
    assert "model/" not in "".join(lines[4:])  # what all names begin with


@needs_dot
def test_graphviz_draws_it_whatever_the_names_are() -> None:
    image = drawing(ODD.dot())
    assert "tensor &quot;odd&quot;" in image
    assert "a &quot;quoted\\ name" in image
    assert image.count("waits for") == 2


@needs_dot
def test_an_empty_picture_can_be_drawn() -> None:
    assert "</svg>" in drawing(Picture("nothing", 1).dot())
