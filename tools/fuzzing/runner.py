"""Runs a case under tfps and beside it what it is compared with, and says what differs."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from tfps.pserver.server import ParameterServer
from tools.fuzzing import oracle
from tools.fuzzing.cases import Case
from tools.fuzzing.oracle import MIRRORED, NOTHING, Difference, Found, Judgement
from tools.fuzzing.pool import Departure, Outcome, Pool, Task
from tools.fuzzing.source import program

NEVER = 2**31


@dataclass(frozen=True)
class Result:
    """
    Args:
        difference: None: all is well.
        refused: plain Keras and tfps alike end with an error, or update="server" is refused by name: the case says
            nothing.
        largest: difference from the reference over what is tolerated.
    """

    case: Case
    text: str
    difference: Difference | None = None
    refused: str = ""
    largest: float = 0.0
    rules: tuple[str, ...] = ()


def run(
    case: Case,
    pool: Pool,
    change: Callable[[str, int], str] = lambda text, rank: text,
    update: str = "worker",
    leaves: tuple[int, int] | None = None,
) -> Result:
    """Runs `case`. `change` may put a fault into the program of a rank, given its text; `update` is of tfps.Config.

    `leaves`: the rank that leaves, and after how many batches of `fit`; it comes back.
    """
    judgement = Judgement.of(case)
    if leaves is not None:
        judgement = judgement.with_departure(case)
    if update == "server" and judgement.bitwise:
        # TensorFlow's own reciprocal root, and sparse gradients that are added up before they are applied.
        judgement = dataclasses.replace(judgement, bitwise=False, rules=(*judgement.rules, "update on the server"))
    mirrored = judgement.reference == MIRRORED
    text = program(case, MIRRORED if mirrored else "plain", update)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tfps-fuzzing-")))
        addresses = []
        for _ in range(case.place.pservers):
            server = ParameterServer("127.0.0.1", 0, workers=case.place.workers)
            stack.callback(server.stop, 0.2)
            addresses.append(server.address)
        tasks = {0: Task(text, "reference", _made(folder / "reference"), {})}
        for rank in range(case.place.workers):
            own = folder / (f"rank{rank}" if case.place.own_folders else "shared")
            environment = {"TFPS_RANK": str(rank), "TFPS_WORKERS": str(case.place.workers)} if addresses else {}
            if addresses:
                environment["TFPS_PSERVERS"] = ",".join(addresses)
            if case.place.goes_on and not any(
                getattr(action, "how", "") == "epoch in a function" for action in case.actions
            ):
                environment["TFPS_MIN_WORKERS"] = "1"
            departure = None
            if leaves is not None:
                environment["TFPS_MIN_WORKERS"] = "1"
                departure = Departure(leaves[1], rank == leaves[0], str(folder / "over"))
            tasks[rank + 1] = Task(change(text, rank), "strategy", _made(own), environment, departure)
        again = {}
        if leaves is not None:
            back, before = case.place.workers + 1, leaves[0] + 1
            impatient = tasks[before].program.replace("connect_timeout_s=300.0", "connect_timeout_s=30.0")
            departure = Departure(NEVER, False, str(folder / "over"))
            tasks[back] = dataclasses.replace(tasks[before], program=impatient, departure=departure)
            again[back] = before
        outcomes = pool.run(tasks, again)
        ranks = [outcomes[rank + 1] for rank in range(case.place.workers)]
        returned = next((outcomes[each] for each in again if each in outcomes), None)
        if leaves is not None and returned is not None:
            del ranks[leaves[0]]

        reference, compared = outcomes[0], case
        if case.jit_compile and reference.found is None and all(each.found is not None for each in ranks):
            judgement = dataclasses.replace(judgement, rules=(*judgement.rules, "only tfps can compile it"))
            compared = dataclasses.replace(case, jit_compile=False)
            plain = program(compared, MIRRORED if mirrored else "plain", update)
            reference = pool.run({0: Task(plain, "reference", _made(folder / "plain"), {})})[0]

        def shaken() -> Found | None:
            text = program(compared, MIRRORED if mirrored else "plain", update, shaken=True)
            return pool.run({0: Task(text, "reference", _made(folder / "shaken"), {})})[0].found

        return _judged(case, text, judgement, reference, ranks, shaken, returned)


def _made(folder: pathlib.Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)


def _judged(
    case: Case,
    text: str,
    judgement: Judgement,
    reference: Outcome,
    ranks: list[Outcome],
    shaken: Callable[[], Found | None],
    returned: Outcome | None = None,
) -> Result:
    """`shaken`: of the reference, from initial weights that differ by a rounding; `returned`: of who came back."""
    errors = [outcome.error for outcome in ranks if outcome.found is None]
    if errors and reference.found is None:
        return Result(case, text, refused=reference.error)
    if errors and all(map(_refuses_to_serve, errors)):
        return Result(case, text, refused=errors[0])
    if errors and judgement.refuses([outcome.error for outcome in ranks]):
        return Result(case, text, rules=(*judgement.rules, "refused by name"))
    if errors:
        said = "\n".join(f"rank {rank}: {each.error[-2500:] or 'ends well'}" for rank, each in enumerate(ranks))
        # The first to fail is not known: prefer what is not the echo of another rank's end.
        kinds = sorted(error.partition("\n")[0].partition(":")[0] for error in errors)
        return Result(case, text, Difference(f"error {kinds[0]}", said), rules=judgement.rules)
    if reference.found is None and judgement.reference == MIRRORED:
        # It cannot do all that tfps can: accumulate gradients, scale losses, average weights, several steps at once.
        rules = (*judgement.rules, "MirroredStrategy fails")
        judgement = dataclasses.replace(judgement, reference=NOTHING, rules=rules)
        reference = Outcome({})
    if reference.found is None:
        failure = Difference(f"only {judgement.reference} fails", reference.error[-2500:])
        return Result(case, text, failure, rules=judgement.rules)
    found = [outcome.found for outcome in ranks if outcome.found is not None]
    difference: Difference | None = oracle.between_ranks(found, judgement)
    if difference is None and returned is not None:
        difference, how = oracle.of_returned(returned, found[0], judgement)
        judgement = dataclasses.replace(judgement, rules=(*judgement.rules, how))
    largest = 0.0
    if difference is None and oracle.finite(reference.found) is None:
        difference = oracle.finite(found[0])
    if difference is None and judgement.reference != NOTHING:
        difference, largest = oracle.with_reference(found[0], reference.found, judgement)
        if difference is not None and not judgement.bitwise:
            difference, largest = oracle.with_reference(found[0], reference.found, judgement, shaken())
            if difference is None:
                judgement = dataclasses.replace(judgement, rules=(*judgement.rules, "rounding that grows"))
    return Result(case, text, difference, largest=largest, rules=judgement.rules)


def _refuses_to_serve(error: str) -> bool:
    """Whether tfps says by name that pservers cannot do this; a rank may only see the other's end."""
    return "update='server'" in error and ("UnsupportedError" in error or "use update='worker'" in error)
