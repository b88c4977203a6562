"""A table that jobs of `moving` train beside their other buckets."""

from __future__ import annotations

import numpy as np

from tfps.exchange.update_spec import StepScalars, UpdateSpec
from tfps.tables.initial import Initial
from tfps.tables.spec import TableSpec

ADAGRAD = UpdateSpec("adagrad", (("epsilon", 1e-7),), (("accumulator", 0.1),), (3,), (False,))
SPEC = TableSpec(dim=3, rows=None, seed=7, initial=Initial("uniform", -1.0, 1.0), update=ADAGRAD)
SCALARS = StepScalars(0, (0.0, 0.5))
TABLE = 3  # its number, after the buckets of `moving.SPECS`
IDS = np.arange(-40, 40) * 2**56
