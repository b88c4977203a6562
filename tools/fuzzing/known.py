"""What is known to fail and not mended: features, by the names of `cases.features`, that are not drawn together."""

from __future__ import annotations

_EMPTY = "eagerly, Keras' `add` takes an operand without rows for a bias: that is Keras' error"

# features -> what is known of it. Faults of tfps leave when they are mended.
KNOWN: dict[str, str] = {
    f"eager + replica without rows + {layer}": _EMPTY for layer in ("LSTM", "last LSTM", "residual")
} | {
    "eager + replica without rows + GlobalMaxPooling1D": "Keras refuses the maximum of no rows",
    "moving mean + rows that do not divide": "replicas with other parts of each step follow means of their own, which "
    "no weighting of the changes alone makes that of the whole batch",
    "replica without rows + SeparableConv2D": "TensorFlow's separable_conv2d gives an input without rows the channels "
    "of its depthwise part, and what follows refuses them: plain Keras fails on such a batch, too",
}
