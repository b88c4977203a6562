"""Time and bytes of every layer of a model, in forward order: what `Report.save_profile` writes, and tools/profiles."""

from __future__ import annotations

import json
import pathlib
from dataclasses import asdict, dataclass, replace

FOLDER = pathlib.Path(__file__).resolve().parent / "profiles"
ITEM_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, of a chain in forward order.

    Args:
        forward_s: seconds of its forward pass on one worker.
        backward_s: seconds of its backward pass; its gradient is complete at the end.
        nbytes: bytes of its trainable float32 parameters, which are exchanged every step; 0: nothing is exchanged.
    """

    name: str
    forward_s: float
    backward_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A model.

    Args:
        layers: in forward order.
        source: where the figures come from, and what was assumed.
    """

    name: str
    layers: tuple[Layer, ...]
    source: str

    @property
    def nbytes(self) -> int:
        """What a worker pushes per step."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Forward and backward of one step."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled(self, divisor: float) -> Profile:
        """The same model with bytes divided, at least one item per layer that has any."""
        layers = (
            replace(la, nbytes=la.nbytes and max(1, round(la.nbytes / divisor / ITEM_BYTES)) * ITEM_BYTES)
            for la in self.layers
        )
        return Profile(f"{self.name}/{divisor:g}", tuple(layers), f"{self.source} Bytes divided by {divisor:g}.")


def names() -> list[str]:
    """The profiles in tools/profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str | pathlib.Path) -> Profile:
    """One of `names()`, or the one in a file whose name ends in .json."""
    path = pathlib.Path(name)
    content = json.loads((path if path.suffix == ".json" else FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Profile(content["name"], tuple(Layer(**layer) for layer in content["layers"]), content["source"])


def save(profile: Profile, path: pathlib.Path) -> None:
    """Writes what `load` reads."""
    path.write_text(json.dumps(asdict(profile), indent=1), encoding="utf-8")
