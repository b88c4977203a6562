"""Results for people and programs."""

from __future__ import annotations

from dataclasses import asdict

from tfps.types import Json
from tools.model_profiles import Profile
from tools.simulation.bounds import lower_bound
from tools.simulation.settings import Cluster, Result, Settings


def to_json(profile: Profile, cluster: Cluster, settings: Settings, result: Result) -> dict[str, Json]:
    """Everything but the spans, with what was asked and the bound."""
    figures = asdict(result)
    del figures["spans"]
    bound_s = lower_bound(profile, cluster)
    return {
        "profile": {"name": profile.name, "nbytes": profile.nbytes, "compute_s": profile.compute_s},
        "cluster": asdict(cluster),
        "settings": asdict(settings),
        "result": figures,
        "lower_bound_s": bound_s,
        "of_lower_bound": bound_s / result.step_s,
    }


def chrome_trace(result: Result) -> dict[str, Json]:
    """The spans for chrome://tracing and ui.perfetto.dev: workers and pservers are processes, streams are tracks."""
    events: list[dict[str, Json]] = []
    processes: dict[str, int] = {}
    tracks: dict[tuple[str, str], int] = {}
    for span in result.spans:
        pid = processes.setdefault(span.process, len(processes) + 1)
        tid = tracks.setdefault((span.process, span.track), len(tracks) + 1)
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": pid,
                "tid": tid,
                "args": span.args,
            }
        )
    for name, pid in processes.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
    for (process, track), tid in tracks.items():
        names = {"name": "thread_name", "ph": "M", "pid": processes[process], "tid": tid, "args": {"name": track}}
        events.append(names)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
