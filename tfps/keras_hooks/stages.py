"""What is known of the stages of a program that are over: what each `fit` and `evaluate` of the job has returned.

A worker that comes to a job under way runs the program from its beginning. A `fit` that the others have ended returns
at once, with their History; its variables have values again when the worker takes part. Until then, whoever reads them
is refused by name: the others may have trained them further.

Tested in tests/elastic/test_stages.py.
"""

from __future__ import annotations

import json
import threading
import time

from tfps.collectives import Broadcast
from tfps.errors import JoinError
from tfps.graph.patches import BaseStrategy
from tfps.graph.tf_private import values
from tfps.keras_hooks.training_state import from_json, in_json
from tfps.types import Json, Model

_LINE = "stage "
_ASK_S = 0.5


def note(strategy: BaseStrategy, stage: str, result: Json) -> None:
    """Leaves rank 0's `result` of a stage, such as "fit 1", with the pservers; every rank must call it."""
    exchange = strategy.extended.exchange
    if not strategy.extended.training.admits or exchange.joining.pending:
        return
    text = json.dumps(in_json(result), default=str)
    said = Broadcast(strategy.extended.runtime, "result of a stage")(text.encode)
    exchange.declare([], [f"{_LINE}{stage}: {said.decode()}"])


def result_of(strategy: BaseStrategy, stage: str) -> Json:
    """What the others have left as the result of a stage; waits until they have ended it.

    Raises:
        JoinError: they have not within `Config.rejoin_timeout_s`, or have gone on without a result.
    """
    begin, limit_s = f"{_LINE}{stage}: ", strategy.config.rejoin_timeout_s
    training, joining = strategy.extended.training.training, strategy.extended.exchange.joining
    deadline_s = time.monotonic() + limit_s
    while True:
        others_in = joining.begun(training)  # asked first: they leave the line before they go on
        for line in joining.lines():
            if line.startswith(begin):
                return from_json(json.loads(line.removeprefix(begin)))
        if others_in > training:
            raise JoinError.because(
                f"the others have gone on from {stage} of the program without a result, as after Ctrl-C or another "
                "exception that the program catches"
            )
        if time.monotonic() > deadline_s:
            raise JoinError.because(
                f"the others have not come to the end of {stage} of the program within {limit_s:.3g} s "
                "(rejoin_timeout_s), or the program calls it on some ranks only"
            )
        threading.Event().wait(_ASK_S)


def forget_values(strategy: BaseStrategy, training: int) -> None:
    """The variables that this worker has created may have been trained by the others since."""
    for reference in strategy.extended.initial_values.agreed:
        if isinstance(variable := reference(), values.MirroredVariable):
            variable.unknown = (
                f"it reads variable {variable.name!r}, whose value it will get when it takes part, but fit number "
                f"{training} of the program is over; a worker can come to a later stage if nothing reads weights "
                "before (predict, evaluate, get_weights, save)"
            )


def know_values(strategy: BaseStrategy) -> None:
    """The variables have their values."""
    for reference in strategy.extended.initial_values.agreed:
        if isinstance(variable := reference(), values.MirroredVariable):
            variable.unknown = ""


def check_known(model: Model) -> None:
    """Raises JoinError if a variable of `model` has not its value."""
    for variable in model.variables:
        if why := getattr(variable.value, "unknown", ""):
            raise JoinError.because(why)
