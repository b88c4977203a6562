"""Profiles of models: those that are there, and files."""

from __future__ import annotations

import pathlib

import pytest

from tools import model_profiles
from tools.model_profiles import Layer, Profile


@pytest.mark.parametrize(
    ("name", "layer_count", "parameters"),
    [("vgg16", 16, 138_357_544), ("vgg19", 19, 143_667_240), ("resnet50", 54, 25_583_592), ("sockeye", 9, 41_642_525)],
)
def test_profiles_have_the_parameters_of_their_models(name: str, layer_count: int, parameters: int) -> None:
    found = model_profiles.load(name)
    assert (len(found.layers), found.nbytes) == (layer_count, 4 * parameters)


def test_a_profile_is_read_as_it_was_written_and_divided_without_losing_a_layer(tmp_path: pathlib.Path) -> None:
    layers = (Layer("a", 1.0, 0.5, 4_000_000), Layer("b", 1.0, 0.5, 8_000_000), Layer("c", 1.0, 0.5, 0))
    own = Profile("own", layers, "made for a test")
    model_profiles.save(own, tmp_path / "a.json")
    assert model_profiles.load(tmp_path / "a.json") == own
    assert [layer.nbytes for layer in own.scaled(1e9).layers] == [4, 4, 0]
    assert own.scaled(4).nbytes == own.nbytes // 4
