"""A case: one random Keras program and where it runs, as plain values from which `source.py` writes the program.

The default of each field is the simplest choice, so that a shrunken case differs from the defaults in what matters;
`features` names these differences.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tfps.types import Argument


@dataclass(frozen=True)
class Fit:
    """`model.fit`.

    Args:
        input: kind of the data.
        steps: `steps_per_epoch`; 0: all.
        again: whether a first `fit` takes from the same generator.
        interrupted: 0, or the number of the batch, from 1, after which Ctrl-C comes; the same call follows.
    """

    epochs: int = 1
    input: str = "arrays"
    shuffle: bool = False
    weighted: str = "no"
    validation: str = "no validation"
    steps: int = 0
    callbacks: tuple[str, ...] = ()
    interrupted: int = 0
    again: bool = False


@dataclass(frozen=True)
class Evaluate:
    input: str = "arrays"
    weighted: bool = False


@dataclass(frozen=True)
class Predict:
    input: str = "arrays"


@dataclass(frozen=True)
class Save:
    """Saves, loads and goes on with what was loaded."""

    what: str = "model.keras"


@dataclass(frozen=True)
class Recompile:
    """Freezes the first layers that have weights (0: none), and compiles again with a new optimizer."""

    frozen: int = 0
    where: str = "in the scope"


@dataclass(frozen=True)
class Loop:
    """A training loop of one's own."""

    epochs: int = 1
    how: str = "step in a function"


@dataclass(frozen=True)
class Assign:
    what: str = "learning rate"


@dataclass(frozen=True)
class OnBatch:
    """`train_on_batch`, each worker its part."""

    steps: int = 2


@dataclass(frozen=True)
class Resume:
    """fit with BackupAndRestore ends in an epoch; a new model goes on."""

    stop: int = 1
    epochs: int = 3


@dataclass(frozen=True)
class Export:
    """Exports the model, loads it as TensorFlow does, without Keras, and calls its signature."""


Action = Fit | Evaluate | Predict | Save | Recompile | Loop | Assign | OnBatch | Resume | Export


@dataclass(frozen=True)
class Optimizer:
    name: str = "SGD"
    momentum: bool = False
    clipping: str = "no clipping"
    ema: int = 0  # how often it overwrites the weights; 0: no EMA
    weight_decay: bool = False
    accumulation: int = 1
    schedule: str = "constant"
    loss_scaling: bool = False


@dataclass(frozen=True)
class Network:
    input: str = "features"
    layers: tuple[str, ...] = ()
    task: str = "regression"
    second_input: bool = False
    second_output: bool = False
    other_loss: str = "mse"  # of the second output
    per_step: bool = False  # sequences: outputs have the steps of the input
    style: str = "functional"
    edges: bool = False  # rows are nodes of graphs, one in each batch, with twice as many edges


@dataclass(frozen=True)
class Place:
    """Where and how the program runs under tfps."""

    workers: int = 1
    devices: int = 1
    pservers: int = 0  # 0: embedded
    slices: str = "auto"
    staging: int = 2
    deterministic: bool = False
    sockets: bool = False
    compression: str = "no compression"
    own_folders: bool = False
    own_initial_values: bool = False
    own_orders: bool = False  # the program sets no seed for what shuffles
    goes_on: bool = False  # without a lost worker (Config.min_workers), though none is lost


@dataclass(frozen=True)
class Case:
    seed: int = 1
    place: Place = Place()
    network: Network = Network()
    optimizer: Optimizer = Optimizer()
    loss: str = "default loss"
    reduction: str = "sum_over_batch_size"
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()
    steps_per_execution: int = 1
    eager: bool = False
    jit_compile: bool = False
    reordered: bool = False  # TensorFlow's arithmetic optimizer may reorder products, as it does unless told otherwise
    step: str = "Keras' train_step"
    start: str = "built in the scope"
    op_determinism: bool = False
    rows: int = 12
    batch: int = 12
    validation_rows: int = 12
    actions: tuple[Action, ...] = (Fit(),)

    @property
    def replicas(self) -> int:
        return self.place.workers * self.place.devices

    @property
    def in_any_order(self) -> bool:
        """Whether a `fit` goes through its rows in an order of its own."""
        return self.unordered or any(
            fit.input == "tf.data without a seed" or (self.place.own_orders and fit.shuffle) for fit in self.fits
        )

    @property
    def unordered(self) -> bool:
        """Whether a dataset's order is another one each time, in plain Keras too."""
        return any(fit.input.startswith("tf.data unordered") for fit in self.fits)

    @property
    def weighted(self) -> bool:
        """Whether rows that losses see have weights."""
        fits = any(fit.weighted != "no" or fit.validation == "weighted validation_data" for fit in self.fits)
        return fits or any(action.weighted for action in self.actions if isinstance(action, Evaluate))

    @property
    def actions_of(self) -> set[str]:
        return {type(action).__name__ for action in self.actions}

    @property
    def fits(self) -> list[Fit]:
        return [action for action in self.actions if isinstance(action, Fit)]

    @property
    def trains(self) -> int:
        """How many actions train."""
        return sum(isinstance(action, (Fit, Loop, OnBatch, Resume)) for action in self.actions)


# Numbers that are no features by themselves; `_computed` says what of them matters.
_SIZES = {"seed", "rows", "batch", "validation_rows", "workers", "devices", "epochs", "stop", "pservers"}


def features(case: Case) -> frozenset[str]:
    """Names of what `case` has beside the simplest program."""
    return frozenset(_different(case)) | frozenset(_computed(case))


def _different(value: Argument) -> list[str]:
    found = []
    for field in dataclasses.fields(value):
        chosen = getattr(value, field.name)
        if field.name in _SIZES:
            continue
        default = field.default
        for each in chosen if isinstance(chosen, tuple) else [chosen]:
            if dataclasses.is_dataclass(each):
                if field.name == "actions":
                    found.append(type(each).__name__)
                found += _different(each)
            elif isinstance(chosen, tuple) or each != default:
                if isinstance(each, str):
                    found.append(each)
                else:
                    found.append(field.name)
    return found


def _computed(case: Case) -> list[str]:
    found = []
    if case.place.workers > 1:
        found.append("several workers")
    if case.place.devices > 1:
        found.append("several devices")
    if case.place.pservers:
        found.append("gRPC")
    batches = batch_sizes(case)
    if any(size % case.replicas for size in batches):
        found.append("rows that do not divide")
    if any(size < case.replicas for size in batches):
        found.append("replica without rows")
    if case.network.per_step and "Embedding masked" in case.network.layers:
        found.append("masked loss")
    if any(size != case.batch for size in batches):
        found.append("smaller last batch")
    return found


def split_rows(case: Case) -> int:
    """How many rows `validation_split` leaves for training, as Keras counts."""
    return int(case.rows * (1 - SPLIT))


SPLIT = 0.25


def batch_sizes(case: Case) -> set[int]:
    """Rows of all batches that replicas share."""
    sizes = set()
    for rows in rows_used(case):
        sizes |= {min(case.batch, rows)} | ({rows % case.batch} - {0})
    return sizes


def rows_used(case: Case) -> set[int]:
    """Numbers of rows that training and evaluation go through."""
    used = {case.rows}
    for fit in case.fits:
        if fit.validation == "validation_split":
            used |= {split_rows(case), case.rows - split_rows(case)}
        elif fit.validation != "no validation":
            used.add(case.validation_rows)
    if "Evaluate" in case.actions_of:
        used.add(case.validation_rows)
    return used
