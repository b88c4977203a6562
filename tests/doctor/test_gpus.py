"""GPUs: what the driver says, what TensorFlow says in a process of its own, and what is made of both."""

from __future__ import annotations

import jobs
import pytest

from tfps.doctor.gpus import TensorFlowGpus, without_tensorflow
from tfps.doctor.report import Check

ANSWER = """print("hello"); print('{"gpus": %d, "version": "2.20", "visible": %s}')"""


def asked(program: str, count: int, timeout_s: float = jobs.DEADLINE_S) -> Check:
    gpus = TensorFlowGpus(program)
    try:
        return gpus.check(count, timeout_s)
    finally:
        gpus.close()


def test_without_tensorflow_the_driver_is_believed() -> None:
    assert without_tensorflow(4).values == {"visible": 4, "seen_by_tensorflow": None}
    assert (without_tensorflow(4).text, without_tensorflow(0).text) == ("4", "none")


@pytest.mark.parametrize(("seen", "count", "text"), [(2, 2, "2 seen by TensorFlow"), (0, 0, "none")])
def test_what_tensorflow_sees_counts(seen: int, count: int, text: str) -> None:
    check = asked(ANSWER % (seen, "null"), count)
    assert (check.status, check.text) == ("ok", text)
    assert check.values == {"visible": count, "seen_by_tensorflow": seen}


@pytest.mark.parametrize(
    ("visible", "says"), [("null", "look at its CUDA libraries"), ('""', "look at CUDA_VISIBLE_DEVICES=''")]
)
def test_gpus_that_tensorflow_does_not_see_are_a_warning(visible: str, says: str) -> None:
    check = asked(ANSWER % (0, visible), 4)
    assert (check.status, check.problem) == ("warning", "unseen")
    assert check.advice.startswith(f"TensorFlow sees none of the 4 GPUs of this host: {says}")


def test_a_tensorflow_that_cannot_be_imported_fails() -> None:
    check = asked("raise ImportError('libfoo.so is missing')", 0)
    assert (check.status, check.problem) == ("failed", "import")
    assert check.advice == "TensorFlow cannot be imported: ImportError: libfoo.so is missing"


def test_a_tensorflow_that_takes_too_long_is_a_warning() -> None:
    check = asked("import threading; threading.Event().wait()", 0, 0.2)
    assert (check.status, check.problem) == ("warning", "slow")


@pytest.mark.long
def test_the_real_tensorflow_answers() -> None:
    gpus = TensorFlowGpus()
    try:
        check = gpus.check(0, 2 * jobs.DEADLINE_S)
    finally:
        gpus.close()
    assert check.values["seen_by_tensorflow"] is not None
