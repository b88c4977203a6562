"""A recorded trace as the profile of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tfps.errors import ConfigError
from tfps.trace.capture import Capture
from tfps.trace.capture_file import write_chrome
from tools import model_profiles, simulation
from tools.simulate import main
from tools.synthetic_captures import synthetic_capture

CLUSTER = simulation.Cluster(2, 2, 2.0)
SETTINGS = simulation.Settings("priority", steps=4)


@pytest.fixture(scope="module", params=["vgg19", "resnet50"])
def model(request: pytest.FixtureRequest) -> model_profiles.Profile:
    return model_profiles.load(request.param)


@pytest.fixture(scope="module")
def capture(model: model_profiles.Profile) -> Capture:
    return synthetic_capture(model, CLUSTER, SETTINGS, "run")


def test_what_was_captured_is_found_again(model: model_profiles.Profile, capture: Capture) -> None:
    found = model_profiles.from_capture(capture)
    assert found.nbytes == model.nbytes
    assert found.compute_s == pytest.approx(model.compute_s, rel=0.05)
    assert sum(layer.backward_s for layer in found.layers) == pytest.approx(
        sum(layer.backward_s for layer in model.layers), rel=0.05
    )
    assert [layer.name for layer in found.layers] == [bucket.name for bucket in capture.buckets]


def test_a_simulation_of_it_takes_as_long_as_that_of_the_model(model: model_profiles.Profile, capture: Capture) -> None:
    again = simulation.simulate(model_profiles.from_capture(capture), CLUSTER, replace(SETTINGS, fuse=False))
    assert again.step_s == pytest.approx(simulation.simulate(model, CLUSTER, SETTINGS).step_s, rel=0.05)


def test_waiting_for_parameters_is_no_computing(model: model_profiles.Profile) -> None:
    slow = synthetic_capture(model, replace(CLUSTER, rate_gbit=0.5), SETTINGS)
    assert model_profiles.from_capture(slow).compute_s == pytest.approx(model.compute_s, rel=0.05)


def test_the_simulator_reads_the_file_of_a_trace(
    capture: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.trace.json.gz"
    write_chrome(capture, path)
    main(["--profile", str(path), "--workers", "2", "--pservers", "2", "--policy", "priority"])
    assert capsys.readouterr().out.startswith("run: ")


@pytest.mark.parametrize("content", [b"", b"no trace"])
def test_what_is_no_trace_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged\.trace\.json\.gz"):
        model_profiles.load(path)


def test_a_capture_without_a_whole_step_is_refused(capture: Capture) -> None:
    empty = replace(capture, spans=tuple(span for span in capture.spans if span.kind != "backward"))
    with pytest.raises(ConfigError, match="forward and a backward pass"):
        model_profiles.from_capture(empty)
