"""What the tests have to know of the Keras that is installed; imports none."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

KERAS_3_8 = importlib.metadata.version("keras").startswith("3.8.")
NOT_IN_KERAS_3_8 = pytest.mark.skipif(KERAS_3_8, reason="fit takes no distribute_datasets_from_function yet")
NEEDS_ORBAX = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None, reason="needs Keras 3.14 and `pip install orbax-checkpoint`"
)
