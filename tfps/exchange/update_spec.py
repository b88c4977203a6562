"""How pservers update the variables of a bucket: what its declaration says, and scalars that come with each push."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tfps.errors import ConfigError, ProtocolError

#: What a rule needs beside the gradient: constants, scalars of each step beside the learning rate, and slots.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum", "nesterov"),
    "adam": ("beta_1", "beta_2", "epsilon"),
    "adamax": ("beta_1", "beta_2", "epsilon"),
    "nadam": ("beta_1", "beta_2", "epsilon"),
    "rmsprop": ("rho", "momentum", "epsilon"),
    "adagrad": ("epsilon",),
    "adadelta": ("rho", "epsilon"),
    "ftrl": ("l1", "l2_shrinkage"),
    "lion": ("beta_1", "beta_2"),
}
SCALARS: dict[str, tuple[str, ...]] = {
    "adam": ("alpha",),
    "adamax": ("power_left",),
    "nadam": ("next_momentum", "next_left", "momentum_left", "product_left", "power_left"),
    "ftrl": ("l2_twice",),
}
SLOTS: dict[str, tuple[str, ...]] = {
    "adam": ("momentum", "velocity"),
    "adamax": ("momentum", "norm"),
    "nadam": ("momentum", "velocity"),
    "rmsprop": ("velocity",),
    "adagrad": ("accumulator",),
    "adadelta": ("accumulated_grad", "accumulated_delta_var"),
    "ftrl": ("accumulator", "linear"),
    "lion": ("momentum",),
}
AVERAGE = "average"  # the slot of a moving average of the variable itself
# A constant: what each of W workers pushes is the W-th part of its change, times the scalar `WEIGHT`. Pservers make the
# mean of it over those who push. So nothing is computed, and no bit changes, where all push with the weight 1.
MEAN, WEIGHT = "mean", "weight"


@dataclass(frozen=True, slots=True)
class UpdateSpec:
    """The rule by which pservers update the variables of one bucket. ConfigError: something is missing or wrong."""

    rule: str  # a key of `CONSTANTS`
    constants: tuple[tuple[str, float], ...]  # the rule's, and `"weight_decay"` if some variables decay
    slots: tuple[tuple[str, float], ...]  # name and initial value of each, in the optimizer's order
    sizes: tuple[int, ...]  # items of each variable, in the bucket's order
    decayed: tuple[bool, ...]  # whether weight decay applies, for each variable

    def __post_init__(self) -> None:
        if self.rule not in CONSTANTS:
            raise ConfigError(f"the rule of an update must be one of {', '.join(CONSTANTS)}, got {self.rule!r}")
        constants, slots = dict(self.constants), dict(self.slots)
        for name in (*CONSTANTS[self.rule], *(("weight_decay",) if any(self.decayed) else ())):
            if name not in constants:
                raise ConfigError(f"the rule {self.rule} must have the constant {name}, got {sorted(constants)}")
        needed = SLOTS.get(self.rule, ("momentum",) if constants.get("momentum") else ())
        if self.rule == "rmsprop" and constants["momentum"] > 0:
            needed = (*needed, "momentum")
        if missing := [name for name in needed if name not in slots]:
            raise ConfigError(f"the rule {self.rule} must have the slots {', '.join(needed)}, got none of {missing}")
        if len(slots) != len(self.slots) or not all(map(math.isfinite, [*constants.values(), *slots.values()])):
            raise ConfigError(f"constants and slots of {self.rule} must be finite, each slot once, got {self}")
        if not self.sizes or min(self.sizes) < 0 or len(self.sizes) != len(self.decayed):
            raise ConfigError(f"sizes and decayed must be given for each variable, got {self.sizes} and {self.decayed}")

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars that come with each push, in order."""
        average = ("average_momentum", "overwrite") if AVERAGE in dict(self.slots) else ()
        weight = (WEIGHT,) if MEAN in dict(self.constants) else ()
        return ("iteration", "learning_rate", *SCALARS.get(self.rule, ()), *average, *weight)

    @property
    def nbytes(self) -> int:
        """Of the parameters."""
        return 4 * sum(self.sizes)

    def text(self) -> str:
        """The spec in one line; `parse` gives the same bits back."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> UpdateSpec:
        """The reverse of `text`, or ConfigError."""
        try:
            found = json.loads(text)
            return cls(
                str(found["rule"]),
                tuple((str(name), float(value)) for name, value in found["constants"]),
                tuple((str(name), float(value)) for name, value in found["slots"]),
                tuple(map(int, found["sizes"])),
                tuple(map(bool, found["decayed"])),
            )
        except ConfigError:
            raise
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"an update must be what UpdateSpec.text returns, got {text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class StepScalars:
    """What comes with a push beside the gradient."""

    mark: int  # whether this rank has assigned variables or slots since its last push, and to what; 0: it has not
    values: tuple[float, ...]  # in the order of `UpdateSpec.scalars`
    wrote: bool = False  # whether it is this rank that has written what all have assigned

    def pack(self) -> bytes:
        """As sent: the mark (u64), `wrote` (u8) and float64 values, little-endian."""
        return struct.pack(f"<QB{len(self.values)}d", self.mark, self.wrote, *self.values)

    @classmethod
    def unpack(cls, data: bytes | memoryview, spec: UpdateSpec) -> StepScalars:
        """The reverse of `pack`. Raises ProtocolError if the size is not that of the scalars of `spec`."""
        names = spec.scalars
        layout = struct.Struct(f"<QB{len(names)}d")
        if len(data) != layout.size:
            raise ProtocolError(f"step scalars of an update must be {', '.join(names)}, got {len(data)} bytes")
        mark, wrote, *values = layout.unpack(data)
        return cls(mark, tuple(values), bool(wrote))


def difference(names: Sequence[str], ours: StepScalars, theirs: StepScalars) -> str | None:
    """Says in what two ranks' scalars of one step differ, beyond rounding; None if they do not."""
    for name, mine, other in zip(names, ours.values, theirs.values, strict=True):
        if name == WEIGHT:
            continue
        same = mine == other or (math.isnan(mine) and math.isnan(other))
        if not same and (name in ("iteration", "overwrite") or not math.isclose(mine, other, rel_tol=1e-5)):
            return f"{name} {mine:g} and {other:g}"
    if ours.mark != theirs.mark:
        return "values that the program has assigned to its variables or the optimizer's"
    return None
