"""GPUs that a worker would see, and those that TensorFlow sees, which a process of its own is asked about."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from tfps.doctor.report import Check
from tfps.types import Json

IMPORT_S = 120.0  # for TensorFlow to be imported on a busy machine
_WAIT_S = 0.5
_ASK = """
import json, os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
names = [device.name for device in tf.config.list_physical_devices("GPU")]
print(json.dumps({"gpus": len(names), "version": tf.__version__, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}))
"""


class TensorFlowGpus:
    """Asks TensorFlow meanwhile: importing it takes seconds. `check` waits for the answer."""

    def __init__(self, program: str = _ASK) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip

    def check(self, count: int, timeout_s: float = IMPORT_S) -> Check:
        """What it sees.

        Args:
            count: of the GPUs that the driver would show to a worker.
        """
        try:
            output, errors = self._communicate(time.monotonic() + timeout_s)
        except subprocess.TimeoutExpired:
            self.close()
            advice = f"TensorFlow could not be imported within {timeout_s:.0f} s: try python -c 'import tensorflow'"
            return Check("gpus", "warning", "TensorFlow does not answer", advice, "slow", _values(count, None))
        seen = _answer(output)
        if seen is None:
            last = (errors.strip() or "no message").splitlines()[-1][:200]
            advice = f"TensorFlow cannot be imported: {last}"
            return Check("gpus", "failed", "TensorFlow fails", advice, "import", _values(count, None))
        if count and not seen["gpus"]:
            what = f"CUDA_VISIBLE_DEVICES={seen['visible']!r}" if seen["visible"] is not None else "its CUDA libraries"
            advice = (
                f"TensorFlow sees none of the {count} GPUs of this host: look at {what}; "
                "pip install 'tensorflow[and-cuda]' brings the libraries"
            )
            text = f"none of {count} seen by TensorFlow"
            return Check("gpus", "warning", text, advice, "unseen", _values(count, 0))
        text = f"{seen['gpus']} seen by TensorFlow" if seen["gpus"] else "none"
        return Check("gpus", "ok", text, values=_values(count, int(seen["gpus"])))

    def _communicate(self, end_s: float) -> tuple[str, str]:
        """In short waits, between which Python notices Ctrl-C that has come to another thread."""
        while True:
            left_s = end_s - time.monotonic()
            try:
                return self._process.communicate(timeout=min(max(left_s, 0.0), _WAIT_S))
            except subprocess.TimeoutExpired:
                if left_s <= _WAIT_S:
                    raise

    def close(self) -> None:
        """Ends the process, if it still runs."""
        self._process.kill()
        self._process.communicate()


def without_tensorflow(count: int) -> Check:
    """What the driver says."""
    return Check("gpus", "ok", str(count) if count else "none", values=_values(count, None))


def _answer(output: str) -> Json | None:
    """The last line, if it is the answer: programs that are started with Python may print something, too."""
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return None
    return found if isinstance(found, dict) and "gpus" in found else None


def _values(count: int, seen: int | None) -> dict[str, Json]:
    return {"visible": count, "seen_by_tensorflow": seen}
