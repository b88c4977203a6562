"""What all ranks conclude of logs in which each has its own part."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import pytest
import tensorflow as tf

import tfps
from tfps.keras_hooks.agreed_logs import Said, Value, _equal, conclude


def said(values: Mapping[str, object], same: dict[str, list[int]] | None = None, weight: int = 1) -> Said:
    """What a rank says of logs with `values`, of which some are the `same` as results of metrics."""
    matches = [(same or {}).get(name, []) for name in values]
    of_rows = [name == "rows" for name in values]
    return Said(weight, False, list(values), [Value.of(value) for value in values.values()], matches, of_rows, False)


def test_what_a_rank_says_arrives_as_it_was_said() -> None:
    values = {"a": tf.constant([np.nan, 1.5], tf.bfloat16), "b": np.int64(2**53 + 1), "c": "text\n", "d": None}
    first = said(values, {"a": [1]})
    assert Said.parse(json.loads(json.dumps(dataclasses.asdict(first)))) == first


def test_numbers_become_the_weighted_mean() -> None:
    ranks = [said({"a": 1.0, "b": [1, 3]}), said({"a": 4.0, "b": [2, 5]}, weight=2)]
    first, second = conclude(ranks, [])
    assert first == 3.0
    np.testing.assert_allclose(np.asarray(second), [5 / 3, 13 / 3])


@pytest.mark.parametrize(
    ("leaf", "result", "equal"),
    [
        ([0.6], np.float32(0.6), True),  # Keras 3.8 returns an array of one number as a scalar
        (np.float32(0.6), np.nextafter(np.float32(0.6), np.float32(1)), True),
        (np.float32(0.6), np.float32(0.60001), False),
        (np.float32(np.nan), np.float32(np.nan), True),
        (7, 8, False),
        ([0.6, 0.6], np.float32(0.6), False),
    ],
)
def test_a_value_is_a_metrics_result_but_for_its_last_bits(leaf: object, result: object, equal: bool) -> None:
    assert _equal(leaf, result) == equal


@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_rank_without_rows_has_no_say_if_its_value_was_cut(value: float) -> None:
    ranks = [said({"a": [2.0]}, weight=2), said({"a": [value]}, weight=2), said({"a": np.zeros([0])}, weight=0)]
    (found,) = conclude(ranks, [])
    np.testing.assert_array_equal(np.asarray(found), [(2.0 + value) / 2])


def test_what_is_the_same_everywhere_stays() -> None:
    values = {"steps": 7, "nan": np.nan, "name": "adam", "nothing": None, "flag": True}
    assert conclude([said(values), said(values)], []) == [None] * 5


def test_a_result_of_a_metric_on_every_rank_is_that_metric_of_its_name_first() -> None:
    ranks = [
        said({"x/mae": 0.5, "other": 0.5, "once": 0.5}, {"x/mae": [0, 1], "other": [0, 1], "once": [0]}),
        said({"x/mae": 0.25, "other": 0.25, "once": 0.75}, {"x/mae": [0, 1], "other": [0, 1], "once": [1]}),
    ]
    assert conclude(ranks, ["loss", "mae"]) == [1, 0, 0.625]


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ("adam", "sgd", r"logs\['a/b'\].*b'adam' on rank 0, b'sgd' on rank 1"),
        (None, 1.0, "None on rank 0, 1.0 on rank 1"),
        ([1.0], [1.0, 2.0], "one shape"),
        (True, False, "True on rank 0, False on rank 1"),
    ],
)
def test_what_cannot_be_made_the_same_is_refused_by_name(first: object, second: object, shown: str) -> None:
    with pytest.raises(tfps.MismatchError, match=shown):
        conclude([said({"a/b": first}), said({"a/b": second})], [])


def test_values_for_each_row_are_joined_in_rank_order_also_where_they_are_equal_by_chance() -> None:
    none = np.zeros([0], np.int64)
    (joined,) = conclude([said({"rows": [1, 0]}), said({"rows": [1]}), said({"rows": none})], [])
    np.testing.assert_array_equal(joined, [1, 0, 1])
    (joined,) = conclude([said({"rows": [1]}), said({"rows": [1]})], [])
    np.testing.assert_array_equal(joined, [1, 1])
