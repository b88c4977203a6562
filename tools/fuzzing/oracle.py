"""What a case must end with: the one table of what is compared with what, and why.

Ranks are always compared with each other, bit for bit. RULES says what is compared beside that: with plain Keras in one
process, with MirroredStrategy in one process (which has the same replicas), or with nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase as fnmatch

import numpy as np

from tfps.types import Value
from tools.fuzzing.cases import Case, Evaluate, Fit, Loop, OnBatch, Recompile, Resume, Save, features
from tools.fuzzing.expressions import SCALAR
from tools.fuzzing.layers import NO_MEANS
from tools.fuzzing.pool import Outcome

Found = Mapping[str, Value]
_REFUSALS = {"JoinError", "UnsupportedError", "WorkerLostError", "ConnectError", "ClosedError"}
PLAIN, MIRRORED, NOTHING = "plain", "mirrored", "nothing"

# Of the largest item of all results of a kind so far: float32 has 6e-8; sums of a few dozen terms and a dozen steps,
# without optimizers that divide by next to nothing (`expressions.py`), have been seen to stay below a third of this.
TOLERANCE = 1e-5
# Of what a change of all initial weights by one rounding makes of a result, where that is more: programs that explode
# amplify what is rounded, and tfps has been seen to differ by up to 2.5 times as much.
AMPLIFIED = 10.0


@dataclass(frozen=True)
class Rule:
    """
    Args:
        reference: what is compared with, where `when` holds.
        bitwise: None: does not matter.
        without: patterns of the names of results (or only their kind) that are not compared with the reference.
        own: as `without`, not compared between ranks either.
        refused: words of tfps' error where it may refuse the program by name: one of them is in the error of each rank.
        why: a sentence.
    """

    name: str
    when: Callable[[Case], bool]
    why: str
    reference: str = PLAIN
    bitwise: bool = True
    without: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def _several(case: Case) -> bool:
    return case.replicas > 1


def _uses(case: Case, *layers: str) -> bool:
    return any(layer in case.network.layers for layer in layers)


def _eager(case: Case) -> bool:
    return case.eager or any(isinstance(each, Loop) and each.how == "eager steps" for each in case.actions)


def _sparse_gradients(case: Case) -> bool:
    return _uses(case, "unique lookup", "embedding_lookup_sparse", "mean of ragged", "sparse Dense")


def _clips(case: Case) -> bool:
    return case.optimizer.clipping != "no clipping"


def _uneven(case: Case) -> bool:
    """Whether replicas may have different numbers of rows; of a last batch that is smaller, even where it divides."""
    return bool({"rows that do not divide", "smaller last batch"} & features(case))


def _differs_in_evaluation(case: Case) -> bool:
    eager_outputs = case.network.second_output and _eager(case)
    counts_alike = case.reduction == "sum" or eager_outputs or case.step != "Keras' train_step"
    return "masked loss" in features(case) or (counts_alike and _uneven(case))


def _saves_what_was_only_evaluated(case: Case) -> bool:
    trained = evaluated = False
    for action in case.actions:
        if isinstance(action, Recompile):
            trained = evaluated = False
        elif isinstance(action, Save) and evaluated and not trained:
            return True
        trained = trained or isinstance(action, (Fit, OnBatch, Resume))  # a loop has its own optimizer
        evaluated = evaluated or isinstance(action, Evaluate)
    return False


_DECIDE = {
    *("EarlyStopping", "EarlyStopping by a baseline", "ReduceLROnPlateau"),
    *("ModelCheckpoint best", "ModelCheckpoint from a threshold"),
}


def _decisive(callbacks: tuple[str, ...]) -> bool:
    return bool(_DECIDE & set(callbacks))


def _decides_by_validation(case: Case) -> bool:
    return any(_decisive(fit.callbacks) and fit.validation != "no validation" for fit in case.fits)


_SIGNS = ("Lion", "Muon", "Adafactor")
_OF_THE_MODEL = ("evaluated", "predictions", "exported", "files", "seen", "history", "epochs")
_OF_ONE_NUMBER = {"scalar function of the other", "subclass of the other"}


def _like_mirrored(case: Case) -> bool:
    """Whether what it is compared with is MirroredStrategy."""
    return _clips(case) or _uses(case, "BatchNormalization")


def _adds_scalars(case: Case) -> bool:
    """Whether MirroredStrategy adds up what is a mean over rows."""
    return case.loss in SCALAR or case.step == "own mean" or case.network.other_loss in _OF_ONE_NUMBER


RULES = (
    Rule(
        "evaluated, not trained",
        _saves_what_was_only_evaluated,
        "under a strategy `evaluate` builds the optimizer, too",
        without=("files/*/optimizer/*", "optimizer *"),
    ),
    Rule("several replicas", _several, "gradients are added in another order", bitwise=False),
    Rule(
        "reordered products",
        lambda case: case.reordered,
        "TensorFlow's arithmetic optimizer reorders products within one graph, across no exchange (docs/design.md)",
        bitwise=False,
    ),
    Rule(
        "XLA",
        lambda case: case.jit_compile,
        "XLA rounds by what it compiles together: in plain Keras a step, in tfps a part",
        bitwise=False,
    ),
    Rule(
        "compression",
        lambda case: case.place.compression != "no compression",
        "gradients are rounded, or come later; what is compared is that ranks end alike",
        NOTHING,
    ),
    Rule(
        "noise",
        lambda case: _several(case) and _uses(case, "Dropout", "GaussianNoise"),
        "noise is each replica's own",
        NOTHING,
    ),
    Rule(
        "signs",
        lambda case: (_several(case) or case.jit_compile) and case.optimizer.name in _SIGNS,
        "the optimizer normalises gradients however small: what is rounded decides the direction of an update",
        NOTHING,
    ),
    Rule(
        "batch statistics",
        lambda case: _several(case) and _uses(case, "BatchNormalization"),
        "each replica normalises by its own rows; MirroredStrategy's moving statistics are the first replica's",
        MIRRORED,
        without=(*_OF_THE_MODEL, "statistics"),
    ),
    Rule(
        "clipping",
        lambda case: _several(case) and _clips(case),
        "each replica's gradient is clipped before the sum; whole, where MirroredStrategy clips a part",
        MIRRORED,
    ),
    Rule(
        "positions and ids taken once, eagerly",
        lambda case: (
            _several(case)
            and _eager(case)
            and (_uses(case, "positions") or _sparse_gradients(case))
            and case.optimizer.name != "SGD"
        ),
        "in eager steps nobody knows which lookups do not come from the batch, or have each id of a replica once; "
        "warned of",
        NOTHING,
    ),
    Rule(
        "generators",
        lambda case: case.replicas > 1 and any(fit.input == "generator" for fit in case.fits),
        "Keras takes some batches before it trains, ranks not equally many",
        NOTHING,
    ),
    Rule(
        "one generator for two calls",
        lambda case: any(fit.again for fit in case.fits),
        "Keras has read ahead, as far as chance had it",
        NOTHING,
    ),
    Rule(
        "first dimensions that differ",
        lambda case: _several(case) and case.network.edges,
        "what has no common first dimension cannot be cut into replicas' parts",
        refused=("first dimension",),
    ),
    Rule(
        "states that are no means over rows",
        lambda case: _several(case) and _uses(case, *NO_MEANS),
        "replicas' values cannot be combined to that of the global batch",
        refused=("mean over rows", "mean over the rows", "aggregation="),
    ),
    Rule(
        "states that are no means over rows, eagerly",
        lambda case: _several(case) and _uses(case, *NO_MEANS) and _eager(case),
        "eager steps cannot tell (docs/semantics.md)",
        NOTHING,
    ),
    Rule(
        "metrics of parts of batches",
        lambda case: _several(case) and "part of the batch" in case.metrics,
        "a function that returns one number for a batch has not said how numbers of two parts are combined",
        without=("*/*part_of_batch",),
    ),
    Rule(
        "sparse gradients under MirroredStrategy",
        lambda case: _several(case) and _sparse_gradients(case) and _like_mirrored(case),
        "MirroredStrategy's replicas have the same row several times",
        NOTHING,
    ),
    Rule(
        "means that are used under MirroredStrategy",
        lambda case: _several(case) and _uses(case, "mean that is used") and _like_mirrored(case),
        "each of MirroredStrategy's replicas uses and changes its own",
        NOTHING,
    ),
    Rule(
        "reshuffled",
        lambda case: (
            _several(case)
            and (_clips(case) or _uses(case, "BatchNormalization"))
            and any(fit.input == "tf.data reshuffled" for fit in case.fits)
        ),
        "under MirroredStrategy Keras makes one more iterator: the dataset's order is that of a later epoch",
        NOTHING,
    ),
    Rule(
        "number of batches unknown",
        lambda case: any(fit.input == "tf.data, number of batches unknown" for fit in case.fits),
        "plain Keras counts the step that finds no batch in `iterations`, which Adam, schedules and EMA see",
        NOTHING,
    ),
    Rule(
        "parts of batches",
        lambda case: _several(case) and _uneven(case) and (_clips(case) or _uses(case, "BatchNormalization")),
        "MirroredStrategy weighs parts alike, however large they are",
        NOTHING,
    ),
    Rule(
        "activity regularizer",
        lambda case: _several(case) and _uses(case, "activity regularizer"),
        "sums over the rows of a replica count alike, by Keras",
        NOTHING,
    ),
    Rule(
        "masks, sums and outputs in evaluation",
        lambda case: _several(case) and _differs_in_evaluation(case),
        "in evaluation a replica's sums, means over unmasked steps and losses of single outputs count alike "
        "(docs/contract.md)",
        without=("evaluated", "history/*/val_*loss", "seen/*/*loss"),
    ),
    Rule(
        "decisions by masks, sums and outputs in evaluation",
        lambda case: _several(case) and _differs_in_evaluation(case) and _decides_by_validation(case),
        "callbacks decide by that",
        NOTHING,
    ),
    Rule(
        "losses of one's own step under MirroredStrategy",
        lambda case: _several(case) and case.step != "Keras' train_step" and _like_mirrored(case),
        "MirroredStrategy's are divided by the number of replicas",
        without=("history/*/*loss", "seen", "evaluated"),
    ),
    Rule(
        "decisions by losses of one's own step under MirroredStrategy",
        lambda case: (
            _several(case)
            and case.step != "Keras' train_step"
            and _like_mirrored(case)
            and any(_decisive(fit.callbacks) for fit in case.fits)
        ),
        "callbacks decide by that",
        NOTHING,
    ),
    Rule(
        "scalar losses under MirroredStrategy",
        lambda case: _several(case) and _adds_scalars(case) and _like_mirrored(case),
        "MirroredStrategy adds up what each replica's loss is as a whole",
        NOTHING,
    ),
    Rule(
        "scalar losses with weights",
        lambda case: (
            _several(case)
            and case.weighted
            and (case.loss in {*SCALAR, "Dice of the batch"} or case.network.other_loss in _OF_ONE_NUMBER)
        ),
        "a mean times a mean of weights is no mean over rows",
        NOTHING,
    ),
    Rule(
        "quotients of sums over a batch",
        lambda case: _several(case) and case.loss == "Dice of the batch",
        "each replica divides its own sums",
        NOTHING,
    ),
    Rule(
        "any order",
        lambda case: (_several(case) and case.in_any_order) or case.unordered,
        "what one process would draw is not known, but that each epoch has all rows once",
        without=(
            *("weights", "statistics", "optimizer *", "predictions", "exported"),
            *("evaluated", "losses", "files", "seen"),
            "history/*/[!z]*",
        ),
    ),
    Rule(
        "train_on_batch under MirroredStrategy",
        lambda case: (
            _several(case) and "OnBatch" in case.actions_of and (_clips(case) or _uses(case, "BatchNormalization"))
        ),
        "gives each replica the global batch",
        NOTHING,
    ),
    Rule(
        "accumulators",
        lambda case: _several(case) and case.optimizer.accumulation > 1,
        "an accumulator is each replica's own, and in a file the writer's",
        without=("files/*/optimizer/*",),
        own=("files/*/optimizer/*",),
    ),
    Rule(
        "accumulators that are loaded",
        lambda case: _several(case) and case.optimizer.accumulation > 1 and bool({"Save", "Resume"} & case.actions_of),
        "what the other replicas had accumulated is lost",
        NOTHING,
    ),
)


@dataclass(frozen=True)
class Judgement:
    """What RULES say of a case."""

    reference: str
    bitwise: bool
    without: frozenset[str]
    own: frozenset[str]
    refused: frozenset[str]
    rules: tuple[str, ...]

    @staticmethod
    def of(case: Case) -> Judgement:
        rules = [rule for rule in RULES if rule.when(case)]
        references = {rule.reference for rule in rules}
        reference = next((r for r in (NOTHING, MIRRORED) if r in references), PLAIN)
        if reference == MIRRORED and case.place.own_initial_values:
            reference = NOTHING
        without = frozenset().union(*(rule.without for rule in rules))
        own = frozenset().union(*(rule.own for rule in rules))
        refused = frozenset().union(*(rule.refused for rule in rules))
        names = tuple(rule.name for rule in rules)
        return Judgement(reference, all(rule.bitwise for rule in rules), without, own, refused, names)

    def with_departure(self, case: Case) -> Judgement:
        """Of the case where a worker leaves and comes back: metrics lack what it had counted of its epoch."""
        decides = any(_decisive(fit.callbacks) for fit in case.fits)
        return dataclasses.replace(
            self,
            reference=PLAIN if self.reference == PLAIN and not decides else NOTHING,
            bitwise=False,
            without=self.without | {"history", "seen"},
            own=self.own | {"seen/*/csv/*"},
            rules=(*self.rules, "a worker leaves"),
        )

    def refuses(self, errors: Sequence[str]) -> bool:
        """Whether all ranks have ended with `errors` that say by name what is not possible; "": one ended well."""
        return all(any(words in error for words in self.refused) for error in errors)


@dataclass(frozen=True)
class Difference:
    """`kind` says what is wrong in a few words, the same for the same fault; `details` is for people."""

    kind: str
    details: str


def between_ranks(ranks: Sequence[Found], judgement: Judgement) -> Difference | None:
    """What differs between ranks."""
    for rank, other in enumerate(ranks[1:], 1):
        if ranks[0].keys() != other.keys():
            names = sorted(ranks[0].keys() ^ other.keys())
            return Difference("ranks have other results", f"only one of rank 0 and {rank} has {names[:5]}")
        for name, value in ranks[0].items():
            if _is_own(name) or _among(name, judgement.own):
                continue
            if _bytes(value) != _bytes(other[name]):
                one, two = _shown(value, other[name]), _shown(other[name], value)
                return Difference(f"ranks differ in {_kind(name)}", f"{name}: rank 0 has {one}, {rank} {two}")
    return None


def of_returned(returned: Outcome, others: Found, judgement: Judgement) -> tuple[Difference | None, str]:
    """What differs of the worker that came back, and how it went: it may be refused by name."""
    if returned.found is None:
        kind = returned.error.partition("\n")[0].partition(":")[0]
        # The others were through before it came.
        if kind in _REFUSALS or (kind == "WaitTimeoutError" and "not joined" in returned.error):
            return None, f"who comes back: {kind}"
        return Difference(f"who comes back ends with {kind}", returned.error[-2500:]), ""
    # What callbacks have seen is numbered from the first epoch on that a worker is in.
    both = {name: value for name, value in others.items() if name in returned.found and _kind(name) != "seen"}
    difference = between_ranks([both, {name: returned.found[name] for name in both}], judgement)
    return difference, "who comes back takes part"


def with_reference(
    found: Found, expected: Found, judgement: Judgement, shaken: Found | None = None
) -> tuple[Difference | None, float]:
    """What differs from the reference, and the largest difference over what is tolerated.

    `shaken`: what the reference has found from initial weights that differ by a rounding.
    """
    largest = 0.0
    sizes, tolerated = _sizes(expected), _tolerated(expected, shaken or {}, judgement)
    first: Difference | None = None
    for name in sorted(found.keys() | expected.keys(), key=_in_order):
        if _is_own(name) or _among(name, judgement.without):
            continue
        if name not in found or name not in expected:
            who = "tfps" if name in found else judgement.reference
            return first or Difference(f"only {who} has {_kind(name)}", name), largest
        value, other = found[name], expected[name]
        if _bytes(value) == _bytes(other):
            continue
        differs, most = _difference(value, other, sizes[name]), tolerated[name]
        if most == float("inf") and (_is_finite(other) or not _is_finite(value)):
            continue
        largest = max(largest, differs / most)
        if first is None and (judgement.bitwise or not differs < most):
            texts = f"{_shown(value, other)}, {judgement.reference} {_shown(other, value)}"
            first = Difference(
                f"other {_kind(name)} than {judgement.reference}", f"{name}: {texts}: differs by {differs:.3g}"
            )
    return first, largest


def _tolerated(expected: Found, shaken: Found, judgement: Judgement) -> dict[str, float]:
    """Of each result; infinity from where on those of the reference are not finite, or others altogether if shaken."""
    tolerated, sizes = dict.fromkeys(expected, TOLERANCE), _sizes(expected)
    for name in expected if shaken else ():
        if not _among(name, judgement.without):
            differs = _difference(shaken[name], expected[name], sizes[name]) if name in shaken else float("inf")
            tolerated[name] = max(TOLERANCE, AMPLIFIED * differs)
    return _so_far(tolerated)


def finite(found: Found) -> Difference | None:
    """Whether all numbers are finite."""
    for name, value in found.items():
        if not _is_finite(value):
            return Difference(f"{_kind(name)} not finite", f"{name}: {_shown(value)}")
    return None


def _is_finite(value: Value) -> bool:
    return np.asarray(value).dtype.kind != "f" or bool(np.isfinite(value).all())


def _is_own(name: str) -> bool:
    """Whether it belongs to one replica: accumulators of gradients."""
    return "accumulat" in name and "gradient" in name


def _among(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatch(name, each) or _kind(name) == each for each in patterns)


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _measured_with(name: str) -> str:
    """Slots of an optimizer are measured together over all variables, as weights are.

    A bias whose gradients cancel exactly (signs of MeanAbsoluteError) has slots of rounding errors alone.
    """
    kind = _kind(name)
    return f"slots {kind.rpartition('_')[2]}" if kind.startswith("optimizer ") else kind


def _in_order(name: str) -> tuple[int, str]:
    """By action, so that the first difference is the earliest."""
    number = name.split("/")[1] if "/" in name else ""
    return (int(number) if number.isdigit() else -1, name)


def _sizes(found: Found) -> dict[str, float]:
    """What each result is measured by: the largest number of what is measured together."""
    sizes = dict.fromkeys(found, 0.0)
    for name, value in found.items():
        array = np.asarray(value)
        if array.dtype.kind == "f" and array.size and _is_finite(array):
            sizes[name] = float(np.abs(array).max())
    return _so_far(sizes)


def _so_far(numbers: Mapping[str, float]) -> dict[str, float]:
    """By result: the largest of what is measured together, in the same action and before."""
    largest: dict[str, float] = {}
    found: dict[str, float] = {}
    in_order = sorted(numbers, key=_in_order)
    for _, action in itertools.groupby(in_order, lambda name: _in_order(name)[0]):
        names = list(action)
        for name in names:
            group = _measured_with(name)
            largest[group] = max(largest.get(group, 0.0), numbers[name])
        found.update({name: largest[_measured_with(name)] for name in names})
    return found


def _difference(value: Value, other: Value, size: float) -> float:
    """Relative to `size`; infinite where they cannot be compared."""
    one, two = np.asarray(value), np.asarray(other)
    if one.shape != two.shape or one.dtype.kind != "f" or two.dtype.kind != "f":
        return 0.0 if one.shape == two.shape and np.array_equal(one, two) else float("inf")
    with np.errstate(invalid="ignore"):
        differs = np.abs(one.astype(np.float64) - two).max(initial=0.0) / max(size, 1e-6)
    return float(differs) if np.isfinite(differs) else float("inf")


def _bytes(value: Value) -> tuple[tuple[int, ...], bytes]:
    array = np.asarray(value)
    if array.dtype.kind == "f":  # IEEE 754 leaves open which of its NaNs an operation returns
        array = np.where(np.isnan(array), array.dtype.type("nan"), array)
    return array.shape, array.tobytes()


def _shown(value: Value, other: Value = None) -> str:
    """`value` for people; of a text where it begins to differ from `other`."""
    if isinstance(value, str) and isinstance(other, str):
        same = next((n for n, pair in enumerate(zip(value, other, strict=False)) if pair[0] != pair[1]), 0)
        return f"...{value[max(same - 60, 0) : same + 60]!r}..."
    array = np.asarray(value)
    return f"{array.reshape(-1)[:4]} {array.shape}" if array.size > 4 else f"{array}"
