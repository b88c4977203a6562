"""What a step of Keras differentiates: numbers for each row are summed over all replicas, and what is no mean is named.

How and why: docs/design.md, "Who weights what".

Tested in tests/programs/taught_vectors.py and tests/integration/programs_named.py.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfps.errors import UnsupportedError
from tfps.graph.ops import place_of
from tfps.graph.row_kinds import Of
from tfps.graph.shares import Share, current_share, say_once
from tfps.keras_hooks.hooks import replaces
from tfps.types import Function, Structure, Value


@replaces(tf.GradientTape, "gradient", "tests/programs/test_taught.py")
def _gradient(
    original: Function,
    tape: tf.GradientTape,
    target: Structure,
    sources: Structure,
    output_gradients: Structure = None,
    *args: object,
    **options: object,
) -> Structure:
    """In a step of Keras that trains, gradients of a vector, which are summed over rows, are those of all replicas.

    Only by variables: a gradient by what comes from a row belongs to that row.
    """
    share, flat = current_share(), tf.nest.flatten(sources)
    by_variables = [isinstance(each, (tf.Variable, keras.Variable)) for each in flat]
    if share is None or share.step != "training" or not any(by_variables):
        return original(tape, target, sources, output_gradients, *args, **options)
    targets = [each.flat_values if isinstance(each, tf.RaggedTensor) else each for each in tf.nest.flatten(target)]
    given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    summed = [_is_summed(share, each, by) for each, by in zip(targets, given, strict=True)]
    if not any(summed):
        return original(tape, target, sources, output_gradients, *args, **options)
    if not all(by_variables):
        raise UnsupportedError(
            "tape.gradient got a target with a number for each row, and both variables and other tensors as sources; "
            "gradients by variables are summed over all replicas and others are not, so call it twice, with "
            "tf.GradientTape(persistent=True)"
        )
    for number, (each, by) in enumerate(zip(targets, given, strict=True)):
        by = tf.ones_like(each) if by is None else tf.convert_to_tensor(by, each.dtype)
        given[number] = by * share.of_whole_sum(each.dtype) if summed[number] else by
    return original(tape, targets, sources, given, *args, **options)


def _is_summed(share: Share, target: Value, by: Value) -> bool:
    """Whether the gradient of `target`, multiplied `by` what is given for it, is a sum over this replica's rows."""
    if not isinstance(target, tf.Tensor) or not target.dtype.is_floating:
        return False
    if target.shape.rank == 0:
        say_if_no_mean(share, "a loss", target)
        return False
    weighted = target if by is None or share.graph is None else target * tf.cast(by, target.dtype)
    if share.has_each_row(weighted):
        return True
    say_if_no_mean(share, "a loss", weighted)
    return False


def say_if_no_mean(share: Share, what: str, value: Value, *, averaged: bool = False) -> None:
    """Logs once, while tracing, that replicas' `value` does not add up to that of the global batch.

    averaged: whether it is to be averaged over what its first dimension has.
    """
    if share.graph is None or not tf.is_symbolic_tensor(value):
        return  # eagerly nobody can tell
    kind = share.kinds.of(value)
    if kind.adds_up and not (averaged and kind.of is Of.PICKED):
        return
    say_once(
        f"{what} {kind.words}, computed at {place_of(share.kinds.origin(value).op)}: each replica computes it from "
        "its own rows, so training differs from that of one process. Sum over the replicas first, for example: "
        "total, count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, "
        "[tf.reduce_sum(losses * weights), tf.reduce_sum(weights)]), and take total / count"
    )


def say_if_metric_is_no_mean(share: Share, name: str, value: Value, *, is_function: bool) -> bool:
    """Logs once that one number that metric `name` gets for a batch does not add up over replicas, or may not.

    is_function: whether a metric function returns it; of these nobody knows what they compute in eager steps. Returns
    whether it was said, now or before.
    """
    what = ""
    if share.graph is None:
        what = "may be no mean of all rows, as an eager step does not show it" if is_function else ""
    elif tf.is_symbolic_tensor(value):
        kind, made = share.kinds.of(value), share.kinds.origin(value).op
        if kind.of is Of.UNSURE and "PyFunc" in made.type:
            what = f"may be no mean of all rows, as Python computes it, at {place_of(made)}"
        elif not kind.adds_up:
            what = f"{kind.words}, at {place_of(made)}"
    if what:
        say_once(
            f"metric {name!r} gets one number for a batch, which {what}: each replica computes it from its own rows, "
            "and it counts by these, so results may differ from those of one process"
            + (", and NaN is left out where others have a number" if is_function else "")
            + ". Give keras.metrics.Mean a number for each row, with sample_weight=0 for rows that are not to count"
        )
    return bool(what)
