"""Errors on their way through a graph, which can carry nothing but a text."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import companion
import keras
import pytest
import tensorflow as tf
import training
from hypothesis import given
from hypothesis import strategies as st

import tfps
from tfps import errors
from tfps.types import Value

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.TfpsError)]
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@tf.function(autograph=False)
def raises(text: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
        return tf.identity(text)


@given(kind=st.sampled_from(KINDS), words=WORDS)
def test_an_error_comes_out_of_a_graph_as_it_went_in(kind: type[errors.TfpsError], words: str) -> None:
    text = errors.to_text(kind(words))
    for found in (errors.from_text(text), errors.in_graph_error(message(text))):
        assert type(found) is kind
        assert str(found) == words


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_function_raises_the_error_itself(kind: type[errors.TfpsError]) -> None:
    @tf.function  # with AutoGraph, which raises it anew
    def function() -> None:
        raise kind("what is wrong")

    with pytest.raises(kind, match="what is wrong") as caught:
        function()
    assert type(caught.value) is kind


@given(words=WORDS)
def test_errors_of_others_are_left_alone(words: str) -> None:
    assert errors.from_text(words) is None
    assert errors.in_graph_error(message(words)) is None


@pytest.mark.parametrize("name", ["ast", "Nothing", "to_text"])
def test_only_classes_of_errors_are_made(name: str) -> None:
    assert errors.from_text(f"tfps.errors.{name}: x") is None


def message(text: str) -> str:
    call = type(raises).__call__
    call = getattr(call, "__wrapped__", call)  # where a strategy has been made in this process, errors are translated
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        call(raises, tf.constant(text))
    return str(caught.value.message)


def test_programs_get_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended the job reaches every way to run a graph, with its class and its words and nothing else."""
    with companion.strategy_with_companion(monkeypatch, tfps.Config(step_timeout_s=60)) as (strategy, other):
        with strategy.scope():
            model, x, y = training.mlp()
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        for each in ("train_on_batch", "test_on_batch"):  # traced before
            getattr(model, each)(x[:32], y[:32])

        @tf.function
        def loop(x: Value, y: Value) -> Value:
            return strategy.run(model.train_step, args=((x, y),))

        given = [tf.constant(x[:32]), tf.constant(y[:32])]
        concrete = loop.get_concrete_function(*given)
        calls: dict[str, Callable[[], object]] = {
            "fit": lambda: model.fit(x, y, verbose=0),
            "evaluate": lambda: model.evaluate(x, y, verbose=0),
            "predict": lambda: model.predict(x, verbose=0),
            "train_on_batch": lambda: model.train_on_batch(*given),
            "test_on_batch": lambda: model.test_on_batch(*given),
            "loop": lambda: loop(*given),
            "concrete": lambda: concrete(*given),
        }
        other.holds = lambda spec: not spec.occasional
        model.train_on_batch(*given)
        assert other.wait_held()
        other._worker.fail(errors.WorkerLostError('rank 7 has "had" enough [really]'))
        for name, call in [*calls.items(), *calls.items()]:
            with pytest.raises(errors.WorkerLostError) as caught:
                print(name, "gives", call())
            assert re.fullmatch(r"rank 1 \(.*\) failed: rank 7 has \"had\" enough \[really\]", str(caught.value))


def test_an_error_for_other_ranks_is_one_line_that_names_it_and_is_short() -> None:
    assert errors.in_a_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert errors.in_a_line(OSError(28, "No space\n left")) == "OSError: [Errno 28] No space left"
    long = errors.in_a_line(ValueError("Graph execution error:\n" + "at node\n" * 1000 + "the disk is full"))
    assert len(long) < 500
    assert long.startswith("ValueError: Graph execution error: at node")
    assert long.endswith("the disk is full")


def test_of_an_error_of_a_graph_other_ranks_get_its_text_not_where_it_was_traced() -> None:
    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        def deep(calls: int) -> tf.Operation:
            return (
                deep(calls - 1) if calls else tf.debugging.Assert(number < 60, ["an id must be below 60, got", number])
            )

        with tf.control_dependencies([deep(12)]):
            return number + 1

    with pytest.raises(tf.errors.InvalidArgumentError, match="Detected at node") as caught:
        step(tf.constant(60))
    text = errors.in_a_line(caught.value)
    assert "assertion failed: [an id must be below 60, got] [60]" in text
    assert "File" not in text


def test_an_outline_has_the_frames_of_the_program_only() -> None:
    with pytest.raises(errors.ConfigError) as caught:
        tfps.Config.from_environment({"TFPS_POLICY": "best"})
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.filename.endswith("config.py") for frame in frames)
    outline = traceback.extract_tb(errors.outlined(caught.value).__traceback__)
    assert outline[0].filename == __file__
    assert {frame.filename for frame in outline} <= {__file__, "<string>"}  # the __init__ of a dataclass
