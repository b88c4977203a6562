"""What all tests share."""

from __future__ import annotations

import os

# TensorFlow reads this when it is imported, here and in the processes that tests start: only warnings and errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
