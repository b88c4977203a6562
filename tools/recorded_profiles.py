"""The profile of a model from a capture of its training (`tfps.callbacks.Trace`)."""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections import defaultdict
from itertools import pairwise

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from model_profiles import ITEM_BYTES, Layer, Profile

from tfps import capture_file
from tfps.capture import Capture, Span
from tfps.errors import ConfigError, TfpsError
from tfps.intervals import difference, total, union


def load(path: str | pathlib.Path) -> Profile:
    """The profile of the capture in a file.

    Raises:
        ConfigError: it is no capture, or does not hold a whole step.
    """
    try:
        return from_capture(capture_file.read(path))
    except (TfpsError, OSError) as error:
        raise ConfigError(f"cannot make a profile of {path}: {error}") from None


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
        if span.kind == "gate":
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
        Layer(_name(capture, bucket), forward_s * own_s / backward_s, own_s, _whole(capture.buckets[bucket].nbytes))
        for bucket, own_s in sorted(found.items(), key=lambda item: capture.buckets[item[0]].priority)
    ]
    return Profile(capture.name or "capture", tuple(layers), f"recorded, medians over {len(forwards)} steps")


def _name(capture: Capture, bucket: int) -> str:
    names = [each.name for each in capture.buckets]
    return names[bucket] if names.count(names[bucket]) == 1 else f"{names[bucket]} ({bucket})"


def _whole(nbytes: int) -> int:
    return nbytes // ITEM_BYTES * ITEM_BYTES
