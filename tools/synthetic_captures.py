#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Captures of simulated training, for tests, benchmarks and trying the trace view without a cluster.

tools/synthetic_captures.py LOG_DIR --policy priority --policy fifo
tools/synthetic_captures.py LOG_DIR --spans 300000
tensorboard --logdir LOG_DIR
"""

from __future__ import annotations

import argparse
import pathlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from tfps.trace.capture import Capture, CapturedBucket, Kind, Process, Span, lane_of
from tfps.trace.capture_file import chrome_path, write_chrome
from tools import model_profiles, simulation
from tools.model_profiles import Profile
from tools.simulation.plan import Plan, make_plan

FIRST_STEP = 10
POLICIES: dict[str, simulation.Policy] = {"priority": "priority", "fifo": "slices", "overlap": "overlap"}
_ORIGIN_NS = 7_000_000_000  # clocks do not start with the capture
_STAGING_BYTES = 4_000_000
_APPLY_GB_S = 0.1


def synthetic_capture(
    profile: Profile, cluster: simulation.Cluster, settings: simulation.Settings, name: str = ""
) -> Capture:
    """The capture of a simulated job. Round k of the simulation is backward k and the forward pass after it."""
    settings = replace(settings, warmup_steps=1, steps=settings.steps + 1, trace=True, mode="exact")
    result = simulation.simulate(profile, cluster, settings)
    converter = _Converter(profile, cluster, make_plan(profile, cluster, settings))
    for span in result.spans:
        converter.add(span)
    spans, count = converter.finish(settings.steps - 1)
    policies = {policy: ours for ours, policy in POLICIES.items()}
    return Capture(
        processes=converter.processes,
        buckets=converter.buckets,
        spans=tuple(spans),
        steps=tuple(range(FIRST_STEP, FIRST_STEP + count)),
        settings={
            "policy": policies.get(settings.policy, settings.policy),
            "slice_bytes": settings.slice_bytes,
            "window_bytes": settings.window_bytes,
            "model": profile.name,
            "rate_gbit": cluster.rate_gbit,
        },
        name=name,
    )


def repeated(capture: Capture, times: int) -> Capture:
    """The same steps several times, one after the other."""
    steps = [span for span in capture.spans if span.kind == "step"]
    begin, count = min(span.begin_ns for span in steps), len(capture.steps)
    period = max(span.end_ns for span in steps) - begin
    spans = [
        span._replace(
            begin_ns=span.begin_ns + time * period, end_ns=span.end_ns + time * period, step=span.step + time * count
        )
        for time in range(times)
        for span in capture.spans
    ]
    first = capture.steps[0]
    return replace(capture, spans=tuple(spans), steps=tuple(range(first, first + times * count)))


class _Converter:
    """Spans of the simulation to those of a capture; times that the simulation does not say follow from others."""

    def __init__(self, profile: Profile, cluster: simulation.Cluster, plan: Plan) -> None:
        self._cluster, self._plan = cluster, plan
        self._layers = {layer.name: number for number, layer in enumerate(profile.layers)}
        self._bucket_of = {layer: bucket for bucket, members in enumerate(plan.layers) for layer in members}
        names = [tuple(profile.layers[layer].name for layer in members) for members in plan.layers]
        self.buckets = tuple(
            CapturedBucket(", ".join(names[number]), names[number], number, sum(piece.nbytes for piece in pieces))
            for number, pieces in enumerate(plan.pieces)
        )
        self.processes = (
            *(
                Process("worker", rank, f"host{rank}", 1_000_000 * rank, 20_000 * rank)
                for rank in range(cluster.workers)
            ),
            *(
                Process("pserver", number, f"host{cluster.pserver_host(number)}:7070", 0, 15_000)
                for number in range(cluster.pservers)
            ),
        )
        self._spans: list[Span] = []
        self._ready: dict[tuple[int, int, int], int] = {}  # rank, round, bucket -> ns
        self._pushes: dict[tuple[int, int, int], list[Span]] = defaultdict(list)  # round, bucket, slice -> wire
        self._replies: dict[tuple[int, int, int], list[Span]] = defaultdict(list)

    def add(self, span: simulation.Span) -> None:
        """One span of the simulation."""
        role, _, number = span.process.partition(" ")
        begin, end = _ns(span.start_s), _ns(span.end_s)
        if span.track == "compute":
            self._compute(int(number), span.name, begin, end, span.args["step"])
            return
        other = int(span.track.rpartition(" ")[2])
        rank, pserver = (int(number), other) if role == "worker" else (other, int(number))
        latency = 0 if self._cluster.pserver_host(pserver) == rank else round(self._cluster.latency_s * 1e9)
        bucket, index, step = span.args["bucket"], span.args["slice"], span.args["step"]
        kind: Kind = "wire" if role == "worker" else "reply_wire"
        made = Span(
            kind, rank if role == "worker" else self._cluster.workers + pserver,
            lane_of(kind, rank=rank, pserver=pserver), begin, end + latency,
            step, bucket, index, priority=bucket, nbytes=span.args["nbytes"], rank=rank, pserver=pserver,
        )  # fmt: skip
        self._spans.append(made)
        (self._pushes if role == "worker" else self._replies)[step, bucket, index].append(made)

    def _compute(self, rank: int, name: str, begin: int, end: int, round_number: int) -> None:
        kind, _, layer = name.partition(" ")
        number = self._layers[layer.removeprefix("for ")]
        bucket = self._bucket_of.get(number, -1)
        if kind == "wait":
            bucket = max(bucket, 0)
            variable = max(self._plan.layers[bucket].index(number) if number in self._plan.layers[bucket] else 0, 0)
            self._spans.append(
                Span("gate", rank, "gates", begin, end, round_number, bucket, -1, variable, bucket, rank=rank)
            )
        elif kind == "backward":
            self._spans.append(Span("backward", rank, "compute", begin, end, round_number, bucket, rank=rank))
            if bucket >= 0 and self._plan.layers[bucket][0] == number:
                self._ready[rank, round_number, bucket] = end
        else:
            self._spans.append(Span("forward", rank, "compute", begin, end, round_number + 1, bucket, rank=rank))

    def finish(self, steps: int) -> tuple[list[Span], int]:
        """All spans of the steps, and how many steps there are."""
        found = [*self._spans, *self._queues(), *self._aggregates(), *self._updates(), *self._gradients()]
        bounds = list(self._steps())
        begin = min(span.begin_ns for span in bounds if span.step == 1)
        ends = {span.rank: span.end_ns for span in bounds if span.kind == "step" and span.step == steps}
        end = max(ends.values())
        kept = [
            span._replace(step=span.step + FIRST_STEP - 1)
            for span in [*found, *bounds]
            if span.begin_ns >= begin
            and span.begin_ns < ends.get(span.process, end)
            and not (span.kind in ("step", "staging") and span.step > steps)
        ]
        return kept, steps

    def _queues(self) -> Iterator[Span]:
        for pushes in self._pushes.values():
            for push in pushes:
                begin = min(self._ready.get((push.rank, push.step, push.bucket), push.begin_ns), push.begin_ns)
                yield push._replace(kind="queued", lane=lane_of("queued"), begin_ns=begin, end_ns=push.begin_ns)
        for key, replies in self._replies.items():
            there = max(push.end_ns for push in self._pushes[key])
            for reply in replies:
                begin = min(there, reply.begin_ns)
                yield reply._replace(
                    kind="reply_queued", lane=lane_of("reply_queued"), begin_ns=begin, end_ns=reply.begin_ns
                )

    def _aggregates(self) -> Iterator[Span]:
        for pushes in self._pushes.values():
            if len(pushes) == self._cluster.workers:
                last = max(pushes, key=lambda push: push.end_ns)
                yield last._replace(
                    kind="aggregate", process=self._cluster.workers + last.pserver, lane=lane_of("aggregate"),
                    begin_ns=min(push.end_ns for push in pushes), end_ns=last.end_ns,
                )  # fmt: skip

    def _updates(self) -> Iterator[Span]:
        arrived: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for replies in self._replies.values():
            for reply in replies:
                arrived[reply.rank, reply.step, reply.bucket].append(reply.end_ns)
        free: dict[int, int] = {}
        for (rank, step, bucket), ends in sorted(arrived.items(), key=lambda item: max(item[1])):
            if len(ends) == len(self._plan.pieces[bucket]):
                begin = max(max(ends), free.get(rank, 0))
                free[rank] = begin + int(self._cluster.apply_gb_s * self.buckets[bucket].nbytes)
                yield Span("update", rank, "updates", begin, free[rank], step, bucket, priority=bucket, rank=rank)

    def _gradients(self) -> Iterator[Span]:
        for (rank, step, bucket), at in self._ready.items():
            nbytes = self.buckets[bucket].nbytes
            yield Span("ready", rank, lane_of("ready"), at, at, step, bucket, priority=bucket, nbytes=nbytes, rank=rank)

    def _steps(self) -> Iterator[Span]:
        """From the end of one backward pass to that of the next; a batch is copied during each."""
        ends: dict[int, dict[int, int]] = defaultdict(dict)
        for span in self._spans:
            if span.kind == "backward":
                ends[span.process][span.step] = max(ends[span.process].get(span.step, 0), span.end_ns)
        for rank, own in ends.items():
            for (_, begin), (step, end) in pairwise(sorted(own.items())):
                yield Span("step", rank, "steps", begin, end, step, rank=rank)
                copied = begin + (end - begin) // 20
                yield Span("staging", rank, "input", begin, copied, step, nbytes=_STAGING_BYTES, rank=rank)


def _ns(seconds: float) -> int:
    return _ORIGIN_NS + round(seconds * 1e9)


def main(arguments: list[str] | None = None) -> None:
    """Reads options, simulates, writes a file per policy and prints its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log_dir", type=pathlib.Path)
    parser.add_argument(
        "--profile", default="vgg19", help=f"{', '.join(model_profiles.names())}, or a JSON file (vgg19)"
    )
    parser.add_argument("--policy", choices=list(POLICIES), action="append", help="may be repeated (priority)")
    parser.add_argument("--workers", type=int, default=4, metavar="N")
    parser.add_argument("--pservers", type=int, default=4, metavar="N")
    parser.add_argument("--rate-gbit", type=float, default=10.0, metavar="N")
    parser.add_argument("--slice-bytes", type=int, default=1 << 20, metavar="N")
    parser.add_argument("--jitter", type=float, default=0.03, metavar="N", help="of computing times, relative (0.03)")
    parser.add_argument("--steps", type=int, default=3, metavar="N")
    parser.add_argument("--spans", type=int, default=0, metavar="N", help="repeat the steps until there are so many")
    options = parser.parse_args(arguments)
    cluster = simulation.Cluster(
        options.workers, options.pservers, options.rate_gbit, dedicated=False, apply_gb_s=_APPLY_GB_S
    )
    for policy in options.policy or ["priority"]:
        settings = simulation.Settings(
            policy=POLICIES[policy],
            slice_bytes=options.slice_bytes,
            window_bytes=2 * options.slice_bytes,
            steps=options.steps,
            jitter=options.jitter,
        )
        capture = synthetic_capture(model_profiles.load(options.profile), cluster, settings, policy)
        if options.spans > len(capture.spans):
            capture = repeated(capture, -(-options.spans // len(capture.spans)))
        path = chrome_path(options.log_dir, policy)
        write_chrome(capture, path)
        print(f"{path}: {len(capture.spans)} spans")


if __name__ == "__main__":
    main()
