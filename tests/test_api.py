"""What is public: `tfps.__all__` and docs/api.md name the same things."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jobs
import pytest
import tensorflow as tf
from api_page import PAGE, public

import tfps
import tfps.ray
from tfps import errors

NAMED = public()


def open_names(of: object) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_the_package_exports_what_the_page_names() -> None:
    modules = {"callbacks", "layers", "__version__"}
    own = {name.removeprefix("tfps.") for name in NAMED} & {"Strategy", "Config"}
    assert set(tfps.__all__) == modules | own | set(NAMED["tfps.errors"])
    assert len(tfps.__all__) == len(set(tfps.__all__))
    assert set(tfps.layers.__all__) == set(NAMED["tfps.layers"])
    assert set(tfps.ray.__all__) == set(NAMED["tfps.ray"])


@pytest.mark.parametrize("name", tfps.__all__)
def test_every_name_leads_to_something_with_a_docstring(name: str) -> None:
    assert name == "__version__" or inspect.getdoc(getattr(tfps, name))


def test_every_error_is_exported() -> None:
    kinds = {name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == "tfps.errors"}
    assert kinds == {name for name in tfps.__all__ if name.endswith("Error")}


def test_a_strategy_has_the_attributes_that_the_page_names_beside_those_of_tensorflow() -> None:
    strategy = tfps.Strategy()
    try:
        own = open_names(strategy) - set(dir(tf.distribute.Strategy))
    finally:
        strategy.close()
    assert own == set(NAMED["tfps.Strategy"])


def test_every_setting_is_described() -> None:
    described = re.findall(r"^ {4}(\w+): ", inspect.getdoc(tfps.Config) or "", re.MULTILINE)
    assert {field.name for field in dataclasses.fields(tfps.Config)} <= {*described}


def test_the_page_has_every_callback() -> None:
    classes = {name for name, each in vars(tfps.callbacks).items() if inspect.isclass(each)}
    own = {name for name in classes if getattr(tfps.callbacks, name).__module__ == "tfps.callbacks"}
    assert {name for name in own if not name.startswith("_")} == set(NAMED["tfps.callbacks"])


def test_the_page_has_every_command() -> None:
    setup = (jobs.ROOT / "setup.py").read_text(encoding="utf-8")
    commands = PAGE.partition("\n## Commands and files\n")[2]
    assert set(re.findall(r'"(tfps_\w+)=tfps\.', setup)) == set(re.findall(r"^\| `(\w+)`", commands, re.MULTILINE))
