"""Which versions of TensorFlow and Keras are taken, and what the others are told; which version tfps itself has."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import conversion

import tfps
from tfps.graph import tf_private
from tfps.graph.tf_private import check_versions
from tfps.strategy.extended import Extended
from tfps.wire.control import PROTOCOL_VERSION

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED = r"TensorFlow 2\.18 to 2\.21 with Keras 3 \(3\.8 or newer\)"


@pytest.fixture
def again() -> Iterator[None]:
    """Imports of tfps check everything once more, with what the test has changed; after it all is as before."""
    modules = {name: module for name, module in sys.modules.items() if name.startswith("tfps.")}
    attributes = dict(vars(tfps))
    for name in modules:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.startswith("tfps.")]:
        del sys.modules[name]
    sys.modules.update(modules)
    vars(tfps).clear()
    vars(tfps).update(attributes)


def import_strategy() -> None:
    importlib.import_module("tfps.strategy.strategy")


@pytest.mark.parametrize(
    ("tensorflow", "keras_version", "environment", "message"),
    [
        ("2.17.1", "3.8.0", {}, rf"{SUPPORTED}, got TensorFlow 2\.17\.1; pip install"),
        ("1.15.0", None, {}, rf"{SUPPORTED}, got TensorFlow 1\.15\.0"),
        ("2.18.0", "2.15.0", {}, rf"{SUPPORTED}, got Keras 2\.15\.0; pip install -U keras"),
        ("2.18.0", "3.7.0", {}, rf"{SUPPORTED}, got Keras 3\.7\.0"),
        ("2.21.0", "3.15.1", {"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS=1 makes .*; unset it .*tfps.ray.Tens"),
    ],
)
def test_what_is_too_old_is_refused_with_what_is_supported(
    tensorflow: str, keras_version: str | None, environment: Mapping[str, str], message: str
) -> None:
    with pytest.raises(ImportError, match=message):
        check_versions(tensorflow, keras_version, environment)


@pytest.mark.parametrize(
    ("tensorflow", "keras_version"),
    [("2.18.0", "3.8.0"), ("2.21.0", "3.15.1"), ("2.20.0-rc1", "3.11.0"), ("2.19.1", None)],
)
def test_what_is_supported_is_taken_without_a_word(tensorflow: str, keras_version: str | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # what earlier tests left may be collected meanwhile
        check_versions(tensorflow, keras_version, {"TF_USE_LEGACY_KERAS": "0"})


def test_these_versions_are_supported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # what earlier tests left may be collected meanwhile
        check_versions(tf.__version__, importlib.metadata.version("keras"), {})


@pytest.mark.usefixtures("again")
def test_an_old_tensorflow_is_refused_when_the_strategy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", "2.17.1")
    with pytest.raises(ImportError, match=rf"{SUPPORTED}, got TensorFlow 2\.17\.1"):
        _ = tfps.Strategy


@pytest.mark.usefixtures("again")
def test_legacy_keras_is_refused_when_the_strategy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "True")
    with pytest.raises(ImportError, match="TF_USE_LEGACY_KERAS=True makes"):
        import_strategy()


@pytest.mark.usefixtures("again")
def test_a_newer_tensorflow_that_has_everything_works_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", "2.30.0")
    with pytest.warns(UserWarning, match=rf"{SUPPORTED}; TensorFlow 2\.30\.0 is newer") as seen:
        import_strategy()
    # Also files that earlier tests left are warned of, when they are collected.
    assert len([each for each in seen if each.category is UserWarning and "tfps" in str(each.message)]) == 1


@pytest.mark.usefixtures("again")
def test_a_newer_tensorflow_without_a_private_name_is_refused_by_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf, "__version__", "2.30.0")
    monkeypatch.delattr(tf_private.distribute_utils, "create_mirrored_variable")
    with (
        pytest.warns(UserWarning),
        pytest.raises(ImportError, match=r"TensorFlow 2\.30\.0 does not fit: .* has no create_mirrored_variable"),
    ):
        import_strategy()


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize(
    ("owner", "name", "library"),
    [
        (tf_private.mirrored_strategy.MirroredExtended, "_input_workers_with_options", "TensorFlow"),
        (tf_private.values, "SyncOnReadVariable", "TensorFlow"),
        (keras.callbacks.ModelCheckpoint, "_get_file_path", "Keras"),
        (keras.optimizers.LossScaleOptimizer, "check_finite", "Keras"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_lacks_a_private_name_is_refused_by_that_name(
    owner: ModuleType | type, name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(ImportError, match=rf"{SUPPORTED}; {library} \S+ does not fit: .* has no (attribute ')?{name}"):
        import_strategy()


@pytest.mark.usefixtures("again")
def test_what_no_longer_gives_its_instances_a_private_attribute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.callbacks.BackupAndRestore, "__init__", lambda self: None)
    with pytest.raises(ImportError, match=r"BackupAndRestore.* has no _weights_path"):
        import_strategy()


@pytest.mark.usefixtures("again")
def test_without_tensorflow_only_the_strategy_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    importlib.import_module("tfps.pserver.server")
    with pytest.raises(ImportError, match=r"pip install 'tfps\[tensorflow\]'"):
        importlib.import_module("tfps.graph.tf_private")


def test_autograph_leaves_functions_of_tfps_alone_and_rewrites_those_of_programs() -> None:
    def of_a_program() -> None:
        """As a user would write it."""

    assert conversion.is_allowlisted(Extended.note_local_write)
    assert not conversion.is_allowlisted(of_a_program)


def test_the_changelog_ends_with_this_version_or_with_one_before_it_while_the_next_is_made() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "Unreleased"
    released = [heading.partition(" - ")[::2] for heading in others]
    dates = [datetime.date.fromisoformat(date) for _, date in released]
    assert dates == sorted(dates, reverse=True)
    versions = [tuple(map(int, version.split("."))) for version, _ in released]
    assert versions == sorted(set(versions), reverse=True)
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(\.dev\d+)?", tfps.__version__)
    assert found, tfps.__version__
    own = tuple(map(int, found.groups()[:3]))
    if found[4]:
        assert [version for version in versions if version >= own] == []
    else:
        assert versions[:1] == [own]


def test_the_documents_name_the_version_of_the_protocol_that_there_is() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [each for page in pages for each in re.findall(r"protocol version (\d+)", page.read_text(encoding="utf-8"))]
    assert set(named) == {str(PROTOCOL_VERSION)}


@pytest.mark.parametrize("module", ["tfps.launch", "tfps.pserver.cli", "tfps.trace.cli", "tfps.doctor"])
def test_every_program_says_its_version(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert re.fullmatch(rf"tfps_(launch|pserver|trace|doctor) {re.escape(tfps.__version__)}\n", done.stdout), done
