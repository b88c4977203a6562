"""The differential tester: what it draws, how it judges, that it finds faults; and that it finds none in tfps."""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tfps.types import Value
from tools.fuzzing import oracle, runner
from tools.fuzzing.cases import Case, Evaluate, Fit, Network, Optimizer, Place, Save, features
from tools.fuzzing.draw import draw, usable
from tools.fuzzing.known import KNOWN
from tools.fuzzing.oracle import MIRRORED, NOTHING, PLAIN, RULES, Judgement
from tools.fuzzing.pool import Outcome, Pool, Task
from tools.fuzzing.session import Session
from tools.fuzzing.simplify import simplified
from tools.fuzzing.source import program

TWO = Place(workers=2, pservers=1)
SMALL = Case(place=TWO, rows=8, batch=4)
FOUND: dict[str, Value] = {"weights/0/0": np.array([1.0, -2.0], np.float32), "files/0/config": "text"}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """For two workers and what they are compared with."""
    with Pool(3) as processes:
        yield processes


def drawn(count: int, without: tuple[str, ...] = ()) -> list[Case]:
    return [draw(f"1 {number}", without=without) for number in range(count)]


def test_every_case_that_is_drawn_is_a_program() -> None:
    for case in drawn(100):
        ast.parse(program(case))


def test_cases_have_every_rule_and_every_feature_that_is_known_to_fail() -> None:
    found = drawn(3000)
    assert [rule.name for rule in RULES if not any(rule.when(case) for case in found)] == []
    assert [name for name in KNOWN if all(usable(case, [name]) for case in found)] == []


def test_what_is_left_out_is_not_drawn() -> None:
    without = ("Adam", "Dropout", "several devices", "Loop")
    for case in drawn(200, without):
        assert not features(case) & set(without)


def test_a_case_of_defaults_has_no_features_but_that_it_fits() -> None:
    assert features(Case()) == {"Fit"}
    assert features(Case(rows=7, batch=3, place=TWO)) >= {"rows that do not divide", "replica without rows"}


def test_one_bit_between_ranks_is_a_difference() -> None:
    other = {**FOUND, "weights/0/0": np.nextafter(FOUND["weights/0/0"], np.float32(9))}
    assert oracle.between_ranks([FOUND, FOUND], Judgement.of(Case())) is None
    difference = oracle.between_ranks([FOUND, other], Judgement.of(Case()))
    assert difference is not None
    assert difference.kind == "ranks differ in weights"
    one, two = ({**FOUND, "history/0/loss": np.array([nan, 1.0], np.float32)} for nan in (np.nan, -np.nan))
    assert oracle.between_ranks([one, two], Judgement.of(Case())) is None


def test_results_that_only_one_rank_has_are_a_difference() -> None:
    difference = oracle.between_ranks([FOUND, {**FOUND, "history/0/loss": 1.0}], Judgement.of(Case()))
    assert difference is not None
    assert difference.kind == "ranks have other results"


@pytest.mark.parametrize(("change", "several", "one"), [(0.0, True, True), (4e-6, True, False), (4e-5, False, False)])
def test_one_replica_is_compared_bitwise_and_several_within_rounding(change: float, several: bool, one: bool) -> None:
    near = {**FOUND, "weights/0/0": FOUND["weights/0/0"] * np.float32(1 + change)}
    assert (oracle.with_reference(near, FOUND, Judgement.of(Case(place=TWO)))[0] is None) is several
    assert (oracle.with_reference(near, FOUND, Judgement.of(Case()))[0] is None) is one


GROWS = {
    "weights/0/0": np.array([8.0], np.float32),
    "weights/1/0": np.array([8e9], np.float32),
    "weights/2/0": np.array([8.0], np.float32),
    "history/1/loss": np.array([1e9]),
}


def changed(plain: dict[str, Value], **relative: float) -> dict[str, Value]:
    """`plain`, with its results of these kinds and actions a little larger."""
    changes = {name: relative.get("_".join(name.split("/")[:2]), 0.0) for name in plain}
    return {name: plain[name] * plain[name].dtype.type(1 + change) for name, change in changes.items()}


@pytest.mark.parametrize(
    ("found", "shaken", "fine"),
    [
        ({"weights_1": 5e-5}, {}, False),
        ({"weights_1": 5e-5}, {"weights_1": 2e-6}, False),
        ({"weights_1": 5e-5}, {"weights_1": 1e-5}, True),
        ({"weights_1": 5e-3}, {"weights_1": 1e-5}, False),
        ({"weights_2": 5e-5}, {"weights_1": 1e-5}, True),  # what has grown stays
        ({"weights_0": 5e-5}, {"weights_1": 1e-5}, False),  # what comes before is what it was
        ({"history_1": 5e-5}, {"weights_1": 1e-5}, False),  # what is measured together grows together
        ({"history_1": 5e-5}, {"weights_1": 1e-5, "history_1": 1e-5}, True),
        ({"weights_1": np.nan, "weights_2": 1.0}, {"weights_1": np.nan}, True),
        ({"weights_1": np.nan, "history_1": np.nan}, {"weights_1": np.nan}, False),
    ],
)
def test_what_a_rounding_at_the_start_makes_of_the_reference_is_tolerated(
    found: dict[str, float], shaken: dict[str, float], fine: bool
) -> None:
    ends = changed(GROWS, **found), GROWS, Judgement.of(Case(place=TWO)), changed(GROWS, **shaken)
    assert (oracle.with_reference(*ends)[0] is None) is fine


def test_a_program_that_ends_with_nan_may_do_so_elsewhere_but_not_be_finite() -> None:
    nan = {**GROWS, "weights/1/0": np.array([np.nan], np.float32), "weights/2/0": np.array([np.nan], np.float32)}
    infinite = {**nan, "weights/1/0": np.array([-np.inf], np.float32)}
    judgement = Judgement.of(Case(place=TWO))
    assert oracle.with_reference(infinite, nan, judgement)[0] is not None
    assert oracle.with_reference(infinite, nan, judgement, nan)[0] is None
    assert oracle.with_reference(GROWS, nan, judgement, nan)[0] is not None


def test_compressed_programs_are_compared_between_ranks_only() -> None:
    place = dataclasses.replace(TWO, pservers=1, compression="int8")
    assert Judgement.of(Case(place=place)).reference == oracle.NOTHING
    assert "int8" in features(Case(place=place))
    assert "compression='int8'" in program(Case(place=place))
    chosen = [draw(f"x {number}", workers=(2,), compressed=1).place.compression for number in range(30)]
    assert len(set(chosen)) > 4
    assert "no compression" not in chosen


def test_programs_that_xla_compiles_are_judged_by_tolerance_and_are_the_same_otherwise() -> None:
    assert Judgement.of(Case()).bitwise
    assert not Judgement.of(Case(jit_compile=True)).bitwise
    for number in range(30):
        every, none = (draw(f"x {number}", compiled=compiled) for compiled in (1, 10**9))
        assert every.jit_compile is (every.place.devices == 1)
        assert f"jit_compile={every.jit_compile}" in program(every)
        assert dataclasses.replace(every, jit_compile=False) == none


def test_slots_are_measured_by_the_largest_slot_of_all_variables() -> None:
    plain = {"optimizer kernel_average/0/0": np.float32(0.5), "optimizer bias_average/0/1": np.float32(0.0)}
    judgement = Judgement.of(Case(place=TWO))
    for noise, fine in ((4e-9, True), (4e-5, False)):
        found = {**plain, "optimizer bias_average/0/1": np.float32(noise)}
        assert (oracle.with_reference(found, plain, judgement)[0] is None) is fine


def test_texts_nan_and_what_is_missing_are_differences() -> None:
    judgement = Judgement.of(Case(place=TWO))
    for other in (
        {**FOUND, "files/0/config": "other"},
        {**FOUND, "weights/0/0": np.full(2, np.nan, np.float32)},
        {"files/0/config": "text"},
    ):
        assert oracle.with_reference(other, FOUND, judgement)[0] is not None
    assert oracle.finite({"x": np.array([np.inf])}) is not None


def test_what_is_documented_as_different_is_not_compared_with_plain_keras() -> None:
    noise, statistics = (
        Case(place=TWO, network=Network(layers=(layer,))) for layer in ("Dropout", "BatchNormalization")
    )
    assert Judgement.of(Case(place=TWO)).reference == PLAIN
    assert Judgement.of(noise).reference == NOTHING
    assert Judgement.of(dataclasses.replace(noise, place=Place())).reference == PLAIN
    assert Judgement.of(statistics).reference == MIRRORED
    assert Judgement.of(Case(place=TWO, optimizer=Optimizer(clipping="clipnorm"))).reference == MIRRORED


def test_a_case_is_shrunk_to_what_matters() -> None:
    case = Case(
        place=Place(workers=3, devices=2, pservers=2, slices="small slices"),
        network=Network(input="words", layers=("Embedding", "LSTM", "last LSTM"), task="classes"),
        optimizer=Optimizer(name="Adam", ema=2),
        metrics=("accuracy",),
        rows=30,
        batch=6,
        actions=(Save(), Fit(epochs=3, callbacks=("EarlyStopping", "ModelCheckpoint")), Evaluate()),
    )

    def fails(case: Case) -> bool:
        return case.place.workers > 1 and any("ModelCheckpoint" in fit.callbacks for fit in case.fits)

    assert simplified(case, fails, lambda: False) == Case(
        place=TWO, rows=2, batch=2, validation_rows=2, actions=(Fit(callbacks=("ModelCheckpoint",)),)
    )


def add_to_a_weight(text: str, rank: int) -> str:
    """Rank 1's weights drift apart after training."""
    wrong = "" if rank == 0 else "        model.weights[0].assign_add(0.001 * model.weights[0])\n"
    return text.replace("        for index, weight in", f"{wrong}        for index, weight in")


def keep_own_logs(text: str, rank: int) -> str:
    """Metrics are not combined over ranks, in this program alone: its process runs others, too."""
    begin = "def main(strategy, folder):\n"
    assert begin in text
    return text.replace(begin, f"{begin}    strategy.extended.combiner.refresh = lambda *_: None\n")


def train_slowly(text: str, rank: int) -> str:
    """All ranks alike train with half the learning rate: other weights than plain Keras."""
    return text.replace("    fit = model.fit(", "    model.optimizer.learning_rate = 0.01\n    fit = model.fit(")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (add_to_a_weight, "ranks differ in weights"),
        (keep_own_logs, "history"),
    ],
)
def test_a_planted_fault_is_found(change: Callable[[str, int], str], kind: str, pool: Pool) -> None:
    result = runner.run(SMALL, pool, change)
    assert result.difference is not None
    assert kind in result.difference.kind
    assert "def main(strategy, folder)" in result.text


# SGD of summed losses: weights grow to 1e12 within seven epochs.
EXPLODES = Case(
    seed=2,
    place=TWO,
    network=Network(layers=("Dense relu", "regularizers")),
    reduction="sum",
    rows=24,
    batch=24,
    actions=(Fit(epochs=7),),
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_program_that_amplifies_rounding_is_judged_by_how_much_and_a_fault_in_it_is_found(pool: Pool) -> None:
    fine, wrong = runner.run(EXPLODES, pool), runner.run(EXPLODES, pool, train_slowly)
    assert fine.difference is None
    assert "rounding that grows" in fine.rules
    assert wrong.difference is not None
    assert "than plain" in wrong.difference.kind


@pytest.mark.long
@pytest.mark.timeout(900)
def test_without_a_fault_none_is_found(pool: Pool) -> None:
    assert runner.run(SMALL, pool).difference is None


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["features", "ragged"])
def test_what_plain_keras_cannot_compile_is_compared_without_xla(kind: str, pool: Pool) -> None:
    network = Network(input=kind, layers=("embedding_lookup_sparse",) if kind == "ragged" else ("Dense",))
    case = dataclasses.replace(SMALL, network=network, jit_compile=True, actions=(Fit(input="tf.data"),))
    result = runner.run(case, pool)
    assert (result.difference, result.refused) == (None, "")
    assert ("only tfps can compile it" in result.rules) is (kind == "ragged")
    faulty = runner.run(result.case, pool, train_slowly)
    assert faulty.difference is not None


ON_TWO_DEVICES = """
import os
import tensorflow as tf


def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def main(strategy, folder):
    def in_replica():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.ones([2 + LONGER * context.replica_id_in_sync_group]))

    tf.function(lambda: strategy.run(in_replica))()
    return {"process": os.getpid()}
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_process_whose_collectives_are_aborted_is_renewed_and_no_other(pool: Pool, tmp_path: Path) -> None:
    def run(*longer: int) -> list[Outcome]:
        texts = [ON_TWO_DEVICES.replace("LONGER", str(each)) for each in longer]
        tasks = {number: Task(text, "strategy", str(tmp_path), {}) for number, text in enumerate(texts)}
        outcomes = pool.run(tasks)
        return [outcomes[number] for number in range(len(longer))]

    first, aborted, again = run(0, 0), run(1, 0), run(0, 0)
    assert "Collective ops is aborted" in aborted[0].error
    assert None not in [each.found for each in (*first, aborted[1], *again)]
    assert first[0].found != again[0].found
    assert first[1].found == aborted[1].found == again[1].found


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_programs_end_as_under_plain_keras(pool: Pool, tmp_path: Path) -> None:
    """Always the same ones: a failure is due to a change."""
    session = Session(minutes=25.0, seed=7, workers=(1, 2), most_cases=3, without=KNOWN, folder=tmp_path)
    session.run(pool)
    assert not session.failures, session.summary()
    assert session.ran["passed"] >= 3, session.summary()


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_random_programs_end_as_under_plain_keras_where_a_worker_comes_back(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    session = Session(minutes=15.0, seed=seed, workers=(2, 3), without=KNOWN, folder=tmp_path, elastic=True)
    session.run()
    assert not session.failures, f"seed {seed}: {session.summary()}"
    assert session.rules["who comes back takes part"], session.summary()


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_many_random_programs_end_as_under_plain_keras(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    session = Session(minutes=15.0, seed=seed, without=KNOWN, folder=tmp_path)
    session.run()
    assert not session.failures, f"seed {seed}: {session.summary()}"
