"""Profiles of models: those that are there, files, and what is refused."""

from __future__ import annotations

import json
import pathlib

import pytest
from small_profiles import TWO_LAYERS

from tfps.errors import ConfigError
from tfps.types import Argument, Json
from tools import make_profiles, model_profiles
from tools.model_profiles import Layer, Profile


@pytest.mark.parametrize(
    ("name", "layer_count", "parameters"),
    [("vgg16", 16, 138_357_544), ("vgg19", 19, 143_667_240), ("resnet50", 54, 25_583_592), ("sockeye", 9, 41_642_525)],
)
def test_profiles_have_the_parameters_of_their_models(name: str, layer_count: int, parameters: int) -> None:
    found = model_profiles.load(name)
    assert (len(found.layers), found.nbytes) == (layer_count, 4 * parameters)
    assert found in make_profiles.profiles()


def test_the_first_layer_of_sockeye_is_its_largest() -> None:
    sizes = [layer.nbytes for layer in model_profiles.load("sockeye").layers]
    assert max(sizes) == sizes[0]


def test_a_profile_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    model_profiles.save(TWO_LAYERS, tmp_path / "a.json")
    assert model_profiles.load(tmp_path / "a.json") == TWO_LAYERS
    assert [layer.nbytes for layer in TWO_LAYERS.scaled(1e9).layers] == [4, 4]
    assert TWO_LAYERS.scaled(4).nbytes == TWO_LAYERS.nbytes // 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"a profile must be an object with name, source, layers, got \[\]"),
        ({"name": "a", "source": "b", "layers": 1}, "layers must be a list, got 1"),
        ({"name": "a", "source": "", "layers": []}, "source of a profile must be a text, got ''"),
        ({"name": "a", "source": "b", "layers": []}, "profile 'a' must have at least one layer"),
        ({"name": "a", "source": "b", "layers": [{}]}, "layer 0 must be an object with name, forward_s"),
    ],
)
def test_a_malformed_profile_is_refused(content: Json, message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        model_profiles.load(path)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (("", 0.0, 0.0, 4), "name of a layer must be a text, got ''"),
        (("a", -1.0, 0.0, 4), "forward_s of layer 'a' must be seconds, at least 0, got -1.0"),
        (("a", 0.0, float("nan"), 4), "backward_s of layer 'a' must be seconds, at least 0, got nan"),
        (("a", 0.0, 0.0, 3), "nbytes of layer 'a' must be a multiple of 4, got 3"),
        (("a", 0.0, 0.0, 4.0), "nbytes of layer 'a' must be a whole number, got 4.0"),
    ],
)
def test_a_layer_out_of_range_is_refused(layer: tuple[Argument, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layer(*layer)


def test_unknown_and_unreadable_profiles_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="one of resnet50, sockeye, vgg16, vgg19 or a JSON file, got 'x'"):
        model_profiles.load("x")
    with pytest.raises(ConfigError, match=r"cannot read profile .*none\.json: No such file"):
        model_profiles.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(ConfigError, match=r"text\.json must be JSON"):
        model_profiles.load(tmp_path / "text.json")
    with pytest.raises(ConfigError, match="layers of profile 'p' must have different names, got twice: \\['a'\\]"):
        Profile("p", (Layer("a", 0, 0, 4), Layer("a", 0, 0, 4)), "s")
    with pytest.raises(ConfigError, match="the divisor of bytes must be positive, got 0"):
        TWO_LAYERS.scaled(0)
