"""What a simulation and an emulation of a model need to know: time and bytes of every layer, in forward order."""

from __future__ import annotations

import json
import math
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise

from tfps.errors import ConfigError, TfpsError
from tfps.trace import capture_file
from tfps.trace.capture import WAITS, Capture, Span
from tfps.trace.step_times import difference, total, union
from tfps.types import Json

FOLDER = pathlib.Path(__file__).resolve().parent / "profiles"
ITEM_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, of a chain in forward order.

    Args:
        forward_s: seconds of its forward pass on one worker.
        backward_s: seconds of its backward pass; its gradient is complete at the end.
        nbytes: bytes of its trainable float32 parameters, which are exchanged every step; 0: nothing is exchanged.

    Raises:
        ConfigError: a value is out of range; the message names layer and field.
    """

    name: str
    forward_s: float
    backward_s: float
    nbytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"name of a layer must be a text, got {self.name!r}")
        for field in ("forward_s", "backward_s"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{field} of layer '{self.name}' must be seconds, at least 0, got {value!r}")
        if isinstance(self.nbytes, bool) or not isinstance(self.nbytes, int):
            raise ConfigError(f"nbytes of layer '{self.name}' must be a whole number, got {self.nbytes!r}")
        if self.nbytes < 0 or self.nbytes % ITEM_BYTES:
            raise ConfigError(f"nbytes of layer '{self.name}' must be a multiple of {ITEM_BYTES}, got {self.nbytes}")


@dataclass(frozen=True, slots=True)
class Profile:
    """A model.

    Args:
        layers: in forward order.
        source: where the figures come from, and what was assumed.

    Raises:
        ConfigError: there are no layers, two of one name, nothing to compute, or nothing to exchange.
    """

    name: str
    layers: tuple[Layer, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError(f"profile '{self.name}' must have at least one layer, got none")
        names = [layer.name for layer in self.layers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"layers of profile '{self.name}' must have different names, got twice: {twice}")
        if not self.nbytes:
            raise ConfigError(f"profile '{self.name}' must have a layer with parameters, got nbytes 0 in all")

    @property
    def nbytes(self) -> int:
        """What a worker pushes per step."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Forward and backward of one step."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def scaled(self, divisor: float, slower: float = 1.0) -> Profile:
        """The same model with bytes divided, at least one item per layer that has any, and times multiplied.

        Raises:
            ConfigError: a factor is not positive.
        """
        for name, value in (("the divisor of bytes", divisor), ("the factor of times", slower)):
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, got {value!r}")
        if divisor == slower == 1:
            return self
        layers = [
            Layer(
                la.name,
                la.forward_s * slower,
                la.backward_s * slower,
                _items(la.nbytes / divisor) * ITEM_BYTES if la.nbytes else 0,
            )
            for la in self.layers
        ]
        source = f"{self.source} Bytes divided by {divisor:g}, times multiplied by {slower:g}."
        return Profile(f"{self.name}/{divisor:g}", tuple(layers), source)


def _items(nbytes: float) -> int:
    return max(1, round(nbytes / ITEM_BYTES))


def names() -> list[str]:
    """The profiles that come with the tools."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str | pathlib.Path) -> Profile:
    """Reads a profile of `names()`, a JSON file, or a trace that `tfps.callbacks.Trace` has recorded.

    Raises:
        ConfigError: there is no such profile, or the file has not the form that `save` writes, or is no trace with a
            whole step; the message names it.
    """
    path = pathlib.Path(name)
    if path.name.endswith(capture_file.SUFFIX):
        try:
            return from_capture(capture_file.read(path))
        except (TfpsError, OSError) as error:
            raise ConfigError(f"cannot make a profile of {path}: {error}") from None
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
        if not path.exists():
            raise ConfigError(f"profile must be one of {', '.join(names())} or a JSON file, got {str(name)!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"profile {path} must be JSON: {error}") from error
    try:
        return parse(content)
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error}") from None


def parse(content: Json) -> Profile:
    """A profile from what its JSON holds.

    Raises:
        ConfigError: names the key or the value that does not fit.
    """
    _check_keys(content, "a profile", ("name", "source", "layers"))
    if not isinstance(content["layers"], list):
        raise ConfigError(f"layers must be a list, got {content['layers']!r}")
    for field in ("name", "source"):
        if not isinstance(content[field], str) or not content[field]:
            raise ConfigError(f"{field} of a profile must be a text, got {content[field]!r}")
    layers = []
    for number, layer in enumerate(content["layers"]):
        _check_keys(layer, f"layer {number}", ("name", "forward_s", "backward_s", "nbytes"))
        layers.append(Layer(**layer))
    return Profile(content["name"], tuple(layers), content["source"])


def save(profile: Profile, path: pathlib.Path) -> None:
    """Writes what `load` reads, one layer per line."""
    layers = ",\n".join(f"  {json.dumps(asdict(layer))}" for layer in profile.layers)
    head = f' "name": {json.dumps(profile.name)},\n "source": {json.dumps(profile.source)},\n'
    path.write_text(f'{{\n{head} "layers": [\n{layers}\n ]\n}}\n', encoding="utf-8")


def from_capture(capture: Capture) -> Profile:
    """A layer per bucket of gradients, in forward order, as rank 0 computed them: medians over the steps.

    The backward pass of a bucket is what lies between its gradient and the one before. The forward pass, without what
    it waited for parameters, is divided in the same proportion: captures have no times of single layers.

    Raises:
        ConfigError: no step has its forward and backward pass and its gradients in the capture.
    """
    worker = capture.workers[0] if capture.workers else None
    steps: dict[int, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    waits = []
    for span in capture.spans:
        if capture.processes[span.process] != worker:
            continue
        if span.kind in WAITS:
            waits.append((span.begin_ns, span.end_ns))
        elif span.kind in ("forward", "backward", "ready"):
            steps[span.step][span.kind].append(span)
    waited = union(waits)
    forwards: list[int] = []
    backwards: dict[int, list[int]] = defaultdict(list)
    for kinds in steps.values():
        if not all(kinds[kind] for kind in ("forward", "backward", "ready")):
            continue
        forwards.append(total(difference(union((s.begin_ns, s.end_ns) for s in kinds["forward"]), waited)))
        ready = sorted(kinds["ready"], key=lambda span: span.end_ns)
        times = [min(span.begin_ns for span in kinds["backward"]), *(span.end_ns for span in ready)]
        for span, (before, now) in zip(ready, pairwise(times), strict=True):
            backwards[span.bucket].append(max(now - before, 0))
    # What does not take part in most steps belongs to another model; what has no size is no gradient of a fixed one.
    found = {
        bucket: statistics.median(ns) * 1e-9
        for bucket, ns in backwards.items()
        if len(ns) > len(forwards) / 2 and capture.buckets[bucket].nbytes >= ITEM_BYTES
    }
    backward_s, forward_s = sum(found.values()), statistics.median(forwards or [0]) * 1e-9
    if not backward_s:
        raise ConfigError("a step must have a forward and a backward pass and gradients, got a capture without one")
    layers = [
        Layer(
            _bucket_name(capture, bucket), forward_s * own_s / backward_s, own_s, _whole(capture.buckets[bucket].nbytes)
        )
        for bucket, own_s in sorted(found.items(), key=lambda item: capture.buckets[item[0]].priority)
    ]
    return Profile(capture.name or "capture", tuple(layers), f"recorded, medians over {len(forwards)} steps")


def _bucket_name(capture: Capture, bucket: int) -> str:
    names = [each.name for each in capture.buckets]
    return names[bucket] if names.count(names[bucket]) == 1 else f"{names[bucket]} ({bucket})"


def _whole(nbytes: int) -> int:
    return nbytes // ITEM_BYTES * ITEM_BYTES


def _check_keys(content: Json, what: str, keys: tuple[str, ...]) -> None:
    if not isinstance(content, Mapping) or set(content) != set(keys):
        got = sorted(content) if isinstance(content, Mapping) else repr(content)
        raise ConfigError(f"{what} must be an object with {', '.join(keys)}, got {got}")
