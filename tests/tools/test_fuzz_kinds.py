"""The differential tester's kinds of rows, orders, states, losses and metrics: drawn, and run in plain Keras."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.fuzzing import oracle, runner
from tools.fuzzing.cases import Case, Fit, Network, Place, features
from tools.fuzzing.draw import draw
from tools.fuzzing.expressions import OF_BATCHES, OPTIMIZERS
from tools.fuzzing.layers import NO_MEANS, STATES
from tools.fuzzing.oracle import NOTHING, PLAIN, Judgement
from tools.fuzzing.pool import Outcome, Pool, Task
from tools.fuzzing.source import program

TWO = Place(workers=2, pservers=1)
OF_ROWS = ["sparse", "ragged", "boxes", "unique lookup"]
KINDS = [
    *OF_ROWS,
    *("edges", "embedding_lookup_sparse", "mean of ragged", "again", "op_determinism"),
    *("tf.data unordered map", "tf.data unordered interleave", "loaded from a file", "weights from a file"),
    *("loss of each row", "loss of each row returned", "scalar function of the other", "subclass of the other"),
    *STATES,
    *OF_BATCHES,
]


@functools.cache
def thousand() -> list[Case]:
    return [draw(f"1 {number}") for number in range(1000)]


def test_a_thousand_cases_have_each_kind() -> None:
    found = Counter(name for case in thousand() for name in features(case))
    assert [name for name in KINDS if found[name] < 3] == []


def test_inputs_that_are_no_arrays_come_with_every_optimizer() -> None:
    cases = [case for case in thousand() if features(case) & set(OF_ROWS)]
    assert {case.optimizer.name for case in cases} == set(OPTIMIZERS)
    assert {case.optimizer.name for case in cases if case.replicas > 1} == set(OPTIMIZERS)


def test_losses_of_outputs_are_evaluated() -> None:
    scalar = [case for case in thousand() if case.network.other_loss != "mse"]
    assert any("Evaluate" in case.actions_of and case.rows % case.replicas for case in scalar)


def refused(case: Case, *errors: str) -> runner.Result:
    """What is said of `case` where plain Keras ends well and ranks with these errors; "": well."""
    ranks = [Outcome(None, error) if error else Outcome({}) for error in errors]
    return runner._judged(case, "", Judgement.of(case), Outcome({}), ranks, lambda: None)


def test_a_refusal_by_name_is_right_where_a_rule_says_so_and_all_ranks_end_with_it() -> None:
    error = "UnsupportedError: components of a batch need one first dimension, got 4 and 8"
    graphs = Case(place=TWO, network=Network(edges=True))
    assert refused(graphs, error, error).difference is None
    assert "refused by name" in refused(graphs, error, error).rules
    assert refused(graphs, error, "").difference is not None
    assert refused(graphs, error, "ValueError: something else").difference is not None
    assert refused(Case(place=TWO), error, error).difference is not None
    assert refused(dataclasses.replace(graphs, place=Place()), error).difference is not None


@pytest.mark.parametrize("state", NO_MEANS)
def test_states_that_are_no_means_may_be_refused_and_others_may_not(state: str) -> None:
    error = f"UnsupportedError: variable 'state' of {state} is not changed by a mean over rows"
    assert Judgement.of(Case(place=TWO, network=Network(layers=(state,)))).refuses([error, error])
    for layer in ("mean of squares", "mean that is used", "counter", "moving mean"):
        judgement = Judgement.of(Case(place=TWO, network=Network(layers=(layer,))))
        assert judgement.reference == PLAIN
        assert not judgement.refuses([error, error])


def test_orders_that_are_another_each_time_are_compared_by_what_rows_there_were() -> None:
    case = Case(metrics=("Rows",), actions=(Fit(input="tf.data unordered map"),))
    judgement = Judgement.of(case)
    sums, other = {"history/0/z_rows": 1.0, "weights/0/0": 1.0}, {"history/0/z_rows": 1.0, "weights/0/0": 2.0}
    assert oracle.with_reference(sums, other, judgement)[0] is None
    assert oracle.with_reference({**sums, "history/0/z_rows": 2.0}, other, judgement)[0] is not None
    assert Judgement.of(Case(actions=(Fit(input="generator", again=True),))).reference == NOTHING


def drawn_of(name: str) -> Iterator[Case]:
    return (case for case in thousand() if name in features(case) and ast.parse(program(case)))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_program_of_each_kind_runs_in_plain_keras(tmp_path: Path) -> None:
    with Pool(1) as pool:
        for number, name in enumerate(KINDS):
            errors: list[str] = []
            for case in itertools.islice(drawn_of(name), 3):  # Keras refuses a few: all layers frozen
                folder = tmp_path / f"{number} {len(errors)}"
                folder.mkdir()
                outcome = pool.run({0: Task(program(case), "reference", str(folder), {})})[0]
                if outcome.found:
                    break
                errors.append(outcome.error)
            else:
                raise AssertionError(f"{name}: {errors}")


IN_A_PROCESS = """
import os
import tensorflow as tf


def strategy():
    return None


def main(strategy, folder):
    SETTING
    return {"process": os.getpid()}
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_process_with_deterministic_operations_runs_no_other_program(tmp_path: Path) -> None:
    settings = ["pass", "tf.config.experimental.enable_op_determinism()", "pass"]
    with Pool(1) as pool:
        tasks = [Task(IN_A_PROCESS.replace("SETTING", each), "strategy", str(tmp_path), {}) for each in settings]
        outcomes = [pool.run({0: task})[0] for task in tasks]
    found = [outcome.found["process"] for outcome in outcomes if outcome.found]
    assert found[0] == found[1] != found[2]
    assert os.getpid() not in found
