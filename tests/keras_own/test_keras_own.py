"""Keras' own unit tests, as its wheel ships them, in the scope of one worker: they pass, but those of one list.

One that fails in plain Keras too (what it needs is not installed) says nothing. tests/keras_own/scoped.py is how they
are run; none of them is in this repository.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import keras
import pytest

LISTED_FOR = "3.15.1"  # the version whose tests EXPECTED has: others have fewer
TIMEOUT_S = 1800.0
ROOT = Path(__file__).resolve().parent.parent.parent

MODULES = {
    "trainers": ["trainers.trainer_test", "trainers.compile_utils_test"],
    "models": [f"models.{name}_test" for name in ("model", "functional", "sequential", "cloning")],
    "callbacks": [
        f"callbacks.{name}_test"
        for name in (
            *("early_stopping", "model_checkpoint", "backup_and_restore", "swap_ema_weights", "tensorboard"),
            *("csv_logger", "lambda_callback", "learning_rate_scheduler", "reduce_lr_on_plateau", "terminate_on_nan"),
        )
    ],
    "optimizers": [
        f"optimizers.{name}_test"
        for name in (
            *("optimizer", "multi_optimizer", "loss_scale_optimizer", "optimizer_sparse", "adam", "adamw", "adagrad"),
            *("adadelta", "adamax", "nadam", "ftrl", "lamb", "lion", "muon", "rmsprop", "sgd", "adafactor"),
            "schedule_free_adamw",
        )
    ],
    "layers": [
        *(f"layers.{name}_test" for name in ("layer", "core.embedding", "core.dense", "core.einsum_dense")),
        *(f"layers.normalization.{name}_test" for name in ("batch_normalization", "spectral_normalization")),
        *(f"layers.{name}_test" for name in ("core.reversible_embedding", "attention.multi_head_attention")),
        "layers.regularization.dropout_test",
        *(f"layers.rnn.{name}_test" for name in ("rnn", "lstm", "gru", "bidirectional", "stacked_rnn_cells")),
        "layers.rnn.time_distributed_test",
    ],
    "losses and metrics": [
        *("losses.loss_test", "losses.losses_test", "regularizers.regularizers_test"),
        *(f"metrics.{name}_test" for name in ("metric", "reduction_metrics", "confusion_metrics")),
    ],
    "others": ["distillation.distiller_test", "wrappers.sklearn_test"],
}

# Not run: one takes away the context of TensorFlow in which others run; the others draw inputs without a seed, and are
# beyond their own limit of 0.004 now and then.
_INT4 = "layers.core.einsum_dense_test::EinsumDenseTest::test_quantize_with_specific_equations_int4"
WITHOUT = {
    "callbacks.swap_ema_weights_test::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute",
    *(f"{_INT4}_{equation}" for equation in ("btd,df->btf", "btd,ndh->btnh", "btnh,nhd->btd")),
}

# What fails: words of its error, and why that is right.
OUTSIDE = "apply() must be called in a replica context", "outside of a replica: Keras' error under every strategy"
IN_SCOPE = "Assert", "exports, and calls what it has loaded in the scope: TensorFlow's error under every strategy"
COMPILED = "jit_compile=True", "a function that XLA compiles around a step is refused by name"
COUNTED = "False != True", "a mock counts what TensorFlow's variables are asked, and those of a strategy are others"
CLEARED = "pop from empty list", "the test itself clears the session, and with it the scope"
BEFORE = "created outside of the scope", "models are made by `setUp`, before the scope"
_SCALED, _SPARSE = "optimizers.loss_scale_optimizer_test::LossScaleOptimizerTest", "optimizers.optimizer_sparse_test::*"
_DENSE, _EINSUM = "layers.core.dense_test::DenseTest", "layers.core.einsum_dense_test::EinsumDenseTest"
_DISTILLER = "distillation.distiller_test::TestDistiller"
EXPECTED: dict[str, tuple[str, str]] = {
    f"{_DENSE}::test_quantize_float8": COMPILED,
    f"{_EINSUM}::test_quantize_float8": COMPILED,
    "optimizers.multi_optimizer_test::*::test_multi_optimizer_wrapped_in_loss_scale_optimizer": OUTSIDE,
    f"{_SCALED}::test_apply_with_no_vars": OUTSIDE,
    f"{_SCALED}::test_*scaling_stateful": OUTSIDE,
    f"{_SCALED}::test_*finite_step*_stateful": OUTSIDE,
    f"{_SCALED}::test_iterations_update_stateful": OUTSIDE,
    f"{_SPARSE}::*_loss_scale_optimizer_sgd": OUTSIDE,
    **{
        f"{_SPARSE}::test_sparse_gradients_{name}": COUNTED
        for name in ("adadelta", "adafactor", "adagrad", "rmsprop", "scatter_update", "sgd")
    },
    "layers.core.embedding_test::*::test_quantize_lora_integration_int*": IN_SCOPE,
    f"{_DENSE}::test_quantize_float8_fitting": IN_SCOPE,
    f"{_DENSE}::test_quantize_lora_integration_int*": IN_SCOPE,
    f"{_EINSUM}::test_quantize_float8_fitting": IN_SCOPE,
    f"{_EINSUM}::test_quantize_lora_integration_int*": IN_SCOPE,
    **{
        f"losses.losses_test::CircleTest::test_{name}": CLEARED
        for name in ("correctness*", "dtype_arg", "mean_with_sample_weight_reduction", "no_reduction", "sum_reduction")
    },
    f"{_DISTILLER}::test_multi_distillation_loss_functionality": BEFORE,
    f"{_DISTILLER}::test_student_loss_weighting": BEFORE,
}


def run(modules: list[str], strategy: str, folder: Path) -> dict[str, str]:
    """What became of the tests of these modules: "", or the error."""
    results, settings = folder / f"{strategy}.json", folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_")}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
        "KERAS_OWN_STRATEGY": strategy,
        "KERAS_OWN_RESULTS": str(results),
        "KERAS_OWN_WITHOUT": json.dumps(sorted(WITHOUT)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    names = [f"keras.src.{module}" for module in modules]
    options = ["-c", str(settings), "--rootdir", str(folder), "-p", "scoped", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *options, "--tb=short", "--disable-warnings", "--pyargs", *names]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert results.exists(), f"{ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    found: dict[str, str] = json.loads(results.read_text(encoding="utf-8"))
    missing = [module for module in modules if not any(name.startswith(f"{module}::") for name in found)]
    assert not missing, f"no tests of {missing}: {ended.stdout[-3000:]}"
    return found


def wrong(found: dict[str, str], modules: list[str], listed: dict[str, tuple[str, str]]) -> dict[str, str]:
    """Of all tests that have run, those that failed though they should not, and the other way round."""
    failures = {name: error for name, error in found.items() if error}
    for pattern, (words, reason) in listed.items():
        names = [name for name in found if fnmatchcase(name, pattern)]
        strict = keras.__version__ == LISTED_FOR and pattern.partition("::")[0] in modules
        if strict and not names:
            failures[pattern] = "is expected to fail, and there is no such test"
        for name in names:
            if name in failures and words in failures[name]:
                del failures[name]
            elif strict and name not in failures:
                failures[name] = f"is expected to fail ({reason}), and passes"
    return failures


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S + 60)
@pytest.mark.parametrize("group", MODULES)
def test_keras_own_tests_pass_in_the_scope(group: str, tmp_path: Path) -> None:
    modules = [name for name in MODULES[group] if importlib.util.find_spec(f"keras.src.{name}")]
    if not modules:
        pytest.skip(f"Keras {keras.__version__} is installed without its tests (keras/src/{MODULES[group][0]})")
    failures = wrong(run(modules, "tfps", tmp_path), modules, EXPECTED)
    suspects = sorted({name.partition("::")[0] for name in failures})
    if suspects:
        plain = run(suspects, "plain", tmp_path)
        failures = {name: error for name, error in failures.items() if not plain.get(name)}
    assert not failures, "\n".join(f"{name}: {error[:1500]}" for name, error in failures.items())


def test_what_is_listed_must_fail_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras, "__version__", LISTED_FOR)
    found = {"a_test::A::test_x": "ValueError: because", "a_test::A::test_y": "", "a_test::B::test_x": "Other: why"}
    left = {"a_test::B::test_x": "Other: why"}
    assert wrong(found, ["a_test"], {}) == {"a_test::A::test_x": "ValueError: because", **left}
    assert wrong(found, ["a_test"], {"a_test::A::*x": ("because", "")}) == left
    assert wrong(found, ["a_test"], {"a_test::A::*x": ("of it", "")}) == wrong(found, ["a_test"], {})
    assert "passes" in wrong(found, ["a_test"], {"a_test::*y": ("", "")})["a_test::A::test_y"]
    assert "no such test" in wrong(found, ["a_test"], {"a_test::*z": ("", "")})["a_test::*z"]
    assert wrong(found, ["a_test"], {"b_test::*": ("", "")}) == wrong(found, ["a_test"], {})


def test_what_is_not_run_or_expected_to_fail_is_of_modules_that_are_run() -> None:
    modules = {name for names in MODULES.values() for name in names}
    assert {name.partition("::")[0] for name in (*WITHOUT, *EXPECTED)} <= modules
