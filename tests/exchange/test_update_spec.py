"""What declarations and pushes say of an update, and what is refused."""

from __future__ import annotations

import math

import pytest

from tfps.errors import ConfigError, ProtocolError
from tfps.exchange.interface import BucketSpec
from tfps.exchange.update_spec import StepScalars, UpdateSpec, difference

ADAM = UpdateSpec(
    "adam",
    (("beta_1", 0.9), ("beta_2", 0.999), ("epsilon", 1e-7), ("weight_decay", 0.004)),
    (("average", 0.0), ("momentum", 0.0), ("velocity", 0.1)),
    (3, 4),
    (True, False),
)


def test_a_spec_survives_its_text_bit_for_bit() -> None:
    odd = UpdateSpec("adagrad", (("epsilon", math.nextafter(1e-7, 1)),), (("accumulator", 0.1 + 0.2),), (5,), (False,))
    assert UpdateSpec.parse(odd.text()) == odd
    assert UpdateSpec.parse(ADAM.text()) == ADAM


def test_numbers_have_names_in_an_order_that_follows_from_the_spec() -> None:
    assert ADAM.scalars == ("iteration", "learning_rate", "alpha", "average_momentum", "overwrite")
    numbers = StepScalars(2**63 + 5, (7.0, 0.1, 0.2, math.nan, 1.0), wrote=True)
    again = StepScalars.unpack(numbers.pack(), ADAM)
    assert (again.mark, again.wrote) == (numbers.mark, True)
    assert str(again.values) == str(numbers.values)
    with pytest.raises(ProtocolError, match=r"step scalars of an update must be iteration, .* got 48 bytes"):
        StepScalars.unpack(numbers.pack()[:-1], ADAM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "muon"}, "the rule of an update must be one of sgd, adam, .* got 'muon'"),
        ({"constants": ()}, "the rule adam must have the constant beta_1, got"),
        (
            {"slots": ()},
            r"the rule adam must have the slots momentum, velocity, got none of \['momentum', 'velocity'\]",
        ),
        ({"slots": (("momentum", math.inf), ("velocity", 0.0))}, "constants and slots of adam must be finite"),
        ({"sizes": (7,)}, "sizes and decayed must be given for each variable"),
    ],
)
def test_what_a_pserver_could_not_apply_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(ADAM, name) for name in ("rule", "constants", "slots", "sizes", "decayed")}
    with pytest.raises(ConfigError, match=message):
        UpdateSpec(**{**fields, **changes})


INFINITE = '{"rule": "sgd", "constants": [], "slots": [], "sizes": [Infinity], "decayed": [false]}'
LONG = '{"rule": "sgd", "constants": [["momentum", 1%s]], "slots": [], "sizes": [1], "decayed": [false]}' % ("0" * 400)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[1]", '{"rule": 1, "constants": 2, "slots": 3, "sizes": 4, "decayed": 5}'),
        pytest.param("[" * 100_000, id="nested deeply"),
        pytest.param(INFINITE, id="infinite size"),
        pytest.param(LONG, id="number without a float"),
    ],
)
def test_text_that_is_no_spec_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an update must be what"):
        UpdateSpec.parse(text)


def test_a_bucket_with_an_update_is_a_float32_sum_of_its_variables() -> None:
    assert BucketSpec(("w",), "sum", 28, "float32", 0, update=ADAM).update
    for kind, nbytes, dtype in (("sum", 32, "float32"), ("sum", 28, "int32"), ("gather", 0, "uint8")):
        with pytest.raises(ConfigError, match="a bucket with an update must be"):
            BucketSpec(("w",), kind, nbytes, dtype, 0, update=ADAM)  # type: ignore[arg-type]


def test_ranks_may_round_a_learning_rate_differently_but_not_count_or_assign_differently() -> None:
    ours = StepScalars(0, (3.0, 0.1, 0.1, 0.9, 0.0))
    assert difference(ADAM.scalars, ours, StepScalars(0, (3.0, 0.1 + 1e-9, 0.1, 0.9, 0.0))) is None
    assert difference(ADAM.scalars, ours, StepScalars(0, (3.0, 0.2, 0.1, 0.9, 0.0))) == "learning_rate 0.1 and 0.2"
    assert difference(ADAM.scalars, ours, StepScalars(0, (4.0, 0.1, 0.1, 0.9, 0.0))) == "iteration 3 and 4"
    assert "assigned" in str(difference(ADAM.scalars, ours, StepScalars(9, ours.values)))
