"""What tests of tfps_doctor share."""

from __future__ import annotations

import pytest


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round trips are never too long, however busy the machine is."""
    monkeypatch.setattr("tfps.doctor.pserver._FAR_S", float("inf"))
