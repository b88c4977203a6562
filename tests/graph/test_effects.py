"""What private names of TensorFlow must do is seen where it is so, and refused where it is not, when it starts."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import tensorflow as tf

import tfps
from tfps.graph import tf_private
from tfps.types import Argument

REFUSED = r"tfps supports TensorFlow 2\.18 to 2\.21 with Keras 3 .*; TensorFlow 2\..* does not fit: "


@pytest.fixture(autouse=True)
def _again() -> Iterator[None]:
    """The next strategy checks once more, and the one after the test."""
    tf_private.check_effects.cache_clear()
    yield
    tf_private.check_effects.cache_clear()


def test_this_tensorflow_has_all_effects() -> None:
    assert tf_private.orders_what_is_not_only_read()
    assert tf_private.leaves_unordered_what_is_only_read()
    assert tf_private.finds_generators()


def test_where_tensorflow_calls_the_attribute_differently_no_strategy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = types.SimpleNamespace(READ_ONLY_RESOURCE_INPUTS_ATTR="_inputs_only_read")
    monkeypatch.setattr(tf_private, "auto_control_deps_utils", renamed)
    assert not tf_private.orders_what_is_not_only_read()
    assert not tf_private.leaves_unordered_what_is_only_read()
    with pytest.raises(tfps.UnsupportedError, match=REFUSED + "variables could be read before their update"):
        tfps.Strategy()


def test_where_datasets_keep_their_functions_elsewhere_no_strategy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = tf_private.flat_map_op._FlatMapDataset.__init__

    def init(self: tf.data.Dataset, *arguments: Argument, **options: Argument) -> None:
        original(self, *arguments, **options)
        del self._map_func

    monkeypatch.setattr(tf_private.flat_map_op._FlatMapDataset, "__init__", init)
    with pytest.raises(tfps.UnsupportedError, match=REFUSED + "workers would get whole batches of a generator"):
        tfps.Strategy()


def test_where_datasets_do_not_tell_their_inputs_no_strategy_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetching = type(tf.data.Dataset.range(1).prefetch(1))
    monkeypatch.setattr(prefetching, "_inputs", lambda self: [], raising=False)
    with pytest.raises(tfps.UnsupportedError, match=REFUSED + "workers would get whole batches of a generator"):
        tfps.Strategy()


def test_a_process_checks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tf_private.check_effects()
    monkeypatch.setattr(tf_private, "set_read_only_inputs", lambda call, indices: None)
    tf_private.check_effects()
    tf_private.check_effects.cache_clear()
    with pytest.raises(tfps.UnsupportedError):
        tf_private.check_effects()
