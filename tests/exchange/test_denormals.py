"""Denormal numbers are zero inside the block, on this thread, and nowhere else."""

from __future__ import annotations

import platform
import threading

import numpy as np
import pytest

from tfps.exchange.denormals import flushed

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or platform.libc_ver()[0] != "glibc",
    reason="flushing is for glibc on x86-64 and ARM",
)


def product() -> float:
    return float((np.array([1e-30] * 64, np.float32) * np.float32(1e-10))[0])


def test_denormal_results_are_zero_inside_and_come_back_after_an_error_too() -> None:
    assert product() > 0
    with pytest.raises(ZeroDivisionError), flushed():
        assert product() == 0
        raise ZeroDivisionError
    assert product() > 0


def test_other_threads_keep_them() -> None:
    found: list[float] = []
    inside = threading.Event()

    def work() -> None:
        inside.wait(60)
        found.append(product())

    thread = threading.Thread(target=work)  # one that begins inside the block would inherit it
    thread.start()
    with flushed():
        inside.set()
        thread.join()
    assert found[0] > 0


def test_a_block_within_a_block_changes_nothing() -> None:
    with flushed():
        with flushed():
            assert product() == 0
        assert product() == 0
