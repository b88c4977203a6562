"""The page that tools/make_benchmarks_page.py writes, from made-up figures."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

import pytest

from tfps.types import Json
from tools import make_benchmarks_page as page
from tools import pages

FACTORS = {"barrier": 1.6, "overlap_send_barrier": 1.4, "overlap": 1.25, "slices": 1.1, "priority": 1.0}


def schedule_runs(model: str = "vgg19") -> list[dict[str, Json]]:
    return [
        {
            "model": model,
            "policy": policy,
            "round": number,
            "gbit": gbit,
            "wire_over_compute": 10 / gbit,
            "step_s": factor * (1 + number / 100) * 10 / gbit,
            "bound_s": 9 / gbit,
            "simulated_s": factor * 9.9 / gbit,
            "time_factor": 2,
        }
        for policy, factor in FACTORS.items()
        for gbit in (5.0, 10.0)
        for number in range(3)
    ]


def scale_runs() -> list[dict[str, Json]]:
    counts = ((2, 2), (4, 4), (8, 8), (4, 1))
    hosts = [
        {
            "what": "hosts",
            "workers": workers,
            "pservers": pservers,
            "layout": layout,
            "gbit": 10.0,
            "step_s": workers / pservers,
            "bound_s": 1.0,
            "simulated_s": 1.1,
        }
        for workers, pservers in counts
        for layout in ("co-located", "dedicated")
    ]
    ends = ("worker", "pserver")
    growth = [
        {
            "what": what,
            "variables": variables,
            "megabytes": megabytes,
            "buckets": variables,
            **{f"{who}_cpu_s": 0.1 for who in ends},
            **{f"{who}_peak_bytes": 90_000_000 for who in ends},
            **{f"idle_{who}_bytes": 60_000_000 for who in ends},
            **{f"{who}_of_aim": 0.5 for who in ends},
        }
        for what, variables, megabytes in (
            ("variables", 10, 50),
            ("variables", 99, 50),
            ("bytes", 50, 1),
            ("bytes", 50, 9),
        )
    ]
    return [*hosts, *growth]


RUNS: dict[str, list[dict[str, Json]]] = {
    "schedule": schedule_runs(),
    "scale": scale_runs(),
    "wire": [{"what": what, "gb_per_s": 0.5, "cpu_s_per_gb": 2.0} for what in ("raw", "1 pserver")],
    "overtaking": [
        {"rate": 100, "transport": "raw", "link": 0.95},
        *(
            {
                "rate": 100,
                "transport": transport,
                "link": 0.99,
                **{f"{way}_{unit}": 2.0 for way in ("push", "reply") for unit in ("ms", "ratio")},
            }
            for transport in ("tcp", "grpc")
        ),
    ],
    "compress": [
        {"what": "codec", "codec": "int8", "encode_s": 0.4, "decode_s": 0.1},
        *(
            {"what": form, "codec": codec, "sent_bytes": 1e6, "step_s": step_s}
            for form in ("asleep", "keras")
            for codec, step_s in (("none", 0.4), ("int8", 0.2))
        ),
    ],
    "remote_update": [
        {"what": "memory", "update": "server", "worker_mb": 1, "pserver_mb": 2, "slots_mb": 3, "collected_s": 0.5},
        {"what": "step", "workers": 2, "update": "server", "step_ms": 100.0},
    ],
    "modes": [
        {
            "task": "digits",
            "mbit": mbit,
            "mode": mode,
            "codec": codec,
            "seed": 0,
            "line": [[seconds, 0.5], [2 * seconds, accuracy]],
            "accuracy": accuracy,
            "rows_per_s": 100 / seconds,
            "bytes_per_row": 1000.0,
        }
        for mbit in (100.0, 1000.0)
        for mode, codec, seconds, accuracy in (
            ("sync", "none", 4.0, 0.98),
            ("sync", "int8", 2.0, 0.97),
            ("diloco", "none", 0.5, 0.975),
        )
    ],
    "chaos": [
        *({"what": "rate", "at_s": at_s, "steps_per_s": 10.0} for at_s in (0.0, 0.5, 1.0)),
        {"what": "event", "event": "rank 0 killed", "at_s": 0.4, "pause_s": 0.1},
        {"what": "event", "event": "worker 0 joins", "at_s": 1.2, "pause_s": 0.2},
        {"what": "bar", "who": "worker 0", "start_s": 0.5, "first_s": 1.2, "end_s": 1.5},
        {"what": "bar", "who": "pserver 0", "start_s": 0.0, "first_s": 0.0, "end_s": 1.5},
    ],
    "security": [{"ratio": ratio, "refused_per_s": 40.0} for ratio in (1.0, 1.01, 1.02)],
    "overhead": [{"model": "small", "plain_step_s": 0.004, "tfps_step_s": 0.008, "ratio": 2.0, "extra_cpu_s": 0.006}],
    "staging": [
        {
            "case": "input",
            "depth": 2,
            "step_s": 0.21,
            "input_s": 0.2,
            "compute_s": 0.1,
            "over_max": 1.05,
            "over_sum": 0.7,
        }
    ],
    "peers": [
        {"case": "1g", "peer": "tfps", "step_s": 1.0, "cpu_s": 0.5},
        {"case": "1g", "peer": "horovod", "left_out": "is not installed"},
    ],
}


def write(docs: pathlib.Path, names: Mapping[str, Sequence[Mapping[str, Json]]] = RUNS) -> pathlib.Path:
    """A docs folder with a JSON file for each of `names`."""
    (docs / "benchmarks").mkdir(parents=True, exist_ok=True)
    for name, runs in names.items():
        content = {
            "bench": name,
            "command": f"tools/bench.py {name} --quick",
            "headline": {"figure": 1.23456},
            "machine": {"processor": "Abacus", "cores": 2, "load": 0.5},
            "versions": {"python": "3.11.0"},
            "runs": runs,
        }
        (docs / "benchmarks" / f"{name}.json").write_text(json.dumps(content))
    return docs


def run(docs: pathlib.Path, *options: str) -> None:
    page.main(["--docs", str(docs), *options])


def test_every_benchmark_has_what_it_measures_and_how_and_equal_figures_give_equal_bytes(
    tmp_path: pathlib.Path,
) -> None:
    docs = write(tmp_path)
    first = page.make(docs)
    text = first["benchmarks.md"].decode()
    for name in RUNS:
        assert f"## {name}\n" in text
        assert f"- Command: `tools/bench.py {name} --quick`" in text
    assert "Abacus" in text
    assert "python 3.11.0" in text
    assert "`figure` 1.235" in text
    assert "Push-pull of 50 MB per step" in text  # the module's docstring
    assert first == page.make(docs)
    assert {"benchmarks.md", "benchmarks/schedule-vgg19.svg", "benchmarks/scale-hosts.svg"} < set(first)
    assert all(content.startswith(b"<?xml") for path, content in first.items() if path.endswith(".svg"))


def test_tables_have_medians_of_the_undivided_model_beside_runs_through_keras(tmp_path: pathlib.Path) -> None:
    engine = schedule_runs()
    keras = [{**run, "form": "keras", "step_s": 1.25} for run in engine if run["policy"] == "priority"][:1]
    text = page.make(write(tmp_path, {"schedule": [*engine, *keras]}))["benchmarks.md"].decode()
    # At 10 Gbit/s priority takes 1.00, 1.01 and 1.02 s at twice the time.
    assert "| 10 | 0.808 | 0.707 | 0.631 | 0.556 | 0.505 | 0.450 | 0.89 |" in text
    assert "| vgg19 | 5 | priority | 2.020 | 1.250 |" in text


def test_sizes_that_were_chosen_stand_beside_the_best_fixed_ones(tmp_path: pathlib.Path) -> None:
    runs = [
        {"model": "vgg19", "wire_over_compute": 1.5, "sizes": sizes, "step_s": step_s}
        for sizes, step_s in (("auto", 1.03), ("32/64", 1.1), ("64/128", 1.0))
    ]
    text = page.make(write(tmp_path, {"tuning": runs}))["benchmarks.md"].decode()
    assert "| vgg19 | 1.5 | 1.030 | 1.100 | 1.000 | 1.030 |" in text


def test_modes_stand_beside_sync_without_compression(tmp_path: pathlib.Path) -> None:
    files = page.make(write(tmp_path, {"modes": RUNS["modes"]}))
    text = files["benchmarks.md"].decode()
    assert "| sync, int8 | 50 | 2.00 | 0.9700 | -1.0 | 1.0 |" in text
    assert "| diloco | 200 | 8.00 | 0.9750 | -0.5 | 1.0 |" in text
    assert "benchmarks/modes-digits.svg" in files


def test_seeds_of_a_mode_stand_beside_those_of_sync(tmp_path: pathlib.Path) -> None:
    """Medians of pairs: with seed 1 both are faster, and sync was never measured with int8."""
    first = [run for run in RUNS["modes"] if run["mbit"] == 100.0]
    second = [
        {**run, "seed": 1, "rows_per_s": 4 * run["rows_per_s"], "accuracy": run["accuracy"] - 0.1}
        for run in first
        if run["codec"] == "none"
    ]
    text = page.make(write(tmp_path, {"modes": [*first, *second]}))["benchmarks.md"].decode()
    assert "| sync, int8 | 50 | 2.00 | 0.9700 | -1.0 | 1.0 |" in text
    assert "| diloco | 500 | 8.00 | 0.9250 | -0.5 | 1.0 |" in text


def test_a_benchmark_without_a_file_is_left_out_by_name(tmp_path: pathlib.Path) -> None:
    text = page.make(write(tmp_path, {"wire": RUNS["wire"]}))["benchmarks.md"].decode()
    assert "## peers\n\nNot measured yet" in text
    assert "peers.svg" not in text


def test_peers_that_were_left_out_are_named_with_the_reason(tmp_path: pathlib.Path) -> None:
    text = page.make(write(tmp_path, {"peers": RUNS["peers"]}))["benchmarks.md"].decode()
    assert "| tfps | 1.000 | 0.500 |" in text
    assert "- horovod: not measured, is not installed\n" in text


def test_check_fails_until_the_page_is_written_again(tmp_path: pathlib.Path) -> None:
    docs = write(tmp_path, {"wire": RUNS["wire"]})
    with pytest.raises(SystemExit, match=r"must be up to date, differs: benchmarks\.md, benchmarks/wire\.svg"):
        run(docs, "--check")
    assert not (docs / "benchmarks.md").exists()
    run(docs)
    run(docs, "--check")
    write(docs, {"wire": [{**RUNS["wire"][0], "gb_per_s": 0.6}]})
    with pytest.raises(SystemExit, match="must be up to date"):
        run(docs, "--check")


def test_plots_that_nothing_makes_any_more_are_removed(tmp_path: pathlib.Path) -> None:
    docs = write(tmp_path, {"security": RUNS["security"]})
    run(docs)
    (docs / "benchmarks" / "schedule-vgg16.svg").touch()
    with pytest.raises(SystemExit, match="schedule-vgg16"):
        run(docs, "--check")
    run(docs)
    assert not (docs / "benchmarks" / "schedule-vgg16.svg").exists()


def test_fields_that_the_page_does_not_know_change_nothing(tmp_path: pathlib.Path) -> None:
    before = page.make(write(tmp_path, {"wire": RUNS["wire"]}))
    after = page.make(write(tmp_path, {"wire": [{**each, "new": 1} for each in RUNS["wire"]]}))
    assert before == after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "wire.json must be JSON"),
        ('{"bench": "wire"}', r"wire.json must be what tools/bench.py writes, with bench, command, headline"),
        (
            '{"bench": "wire", "command": "", "headline": {}, "machine": {}, "versions": {}, "runs": [{"what": 0}]}',
            r"every run in wire.json must have 'gb_per_s'; measure again: tools/bench.py wire",
        ),
    ],
)
def test_a_file_of_another_form_is_refused_by_name(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "wire.json").write_text(text)
    with pytest.raises(pages.PageError, match=message):
        page.make(tmp_path)


def test_the_page_in_docs_is_up_to_date() -> None:
    run(pages.ROOT / "docs", "--check")
