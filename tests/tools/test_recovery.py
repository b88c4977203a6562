"""What the benchmarks of lost workers make of the times of steps. No job is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.recovery import deaths
from tools.recovery.job import TIME, Step, read_steps


def test_steps_are_read_while_a_worker_writes_one(tmp_path: Path) -> None:
    path = tmp_path / "0.times"
    assert read_steps(path) == []
    path.write_bytes(TIME.pack(1, 2, 3.5) + TIME.pack(1, 3, 4.5)[:-1])
    assert read_steps(path) == [Step(1, 2, 3.5)]


def test_a_step_that_is_taken_again_counts_once() -> None:
    before = [Step(0, 1, 1.0), Step(0, 2, 2.0), Step(0, 3, 3.0)]
    again = [Step(0, 2, 5.0), Step(0, 3, 6.0), Step(0, 4, 7.0)]
    assert deaths._new_steps([before, again]) == [1.0, 2.0, 3.0, 7.0]


def test_a_pause_for_a_lost_worker_and_one_for_a_new_one_are_told_apart() -> None:
    killed_s = 1.0
    ends = [0.8, 0.9, 3.0, 3.1, 6.5, 6.6, 7.6, 7.7]
    assert deaths._pauses(ends, killed_s, 20.0) == (3.4, 1.0)  # the other one is started at 6.0
    assert deaths._pauses([0.9, 30.0, 30.1], killed_s, 20.0) == (29.1, 0.0)  # one pause for both


def test_horovod_that_is_not_installed_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFPS_PEERS_HOME", str(tmp_path))
    assert deaths.absence("horovod_5s") == "horovod_5s is left out: tools/peers.py install horovod"
    assert deaths.absence("goes_on") is None
