"""Layers of random models by the rank of what goes in: lines of a program, and the rank of what comes out.

In the lines `h` is what goes in and what comes out, NUMBER that of the layer.
"""

from __future__ import annotations

Table = dict[str, tuple[str, int]]

# Layers of the programs' own.
CLASSES = {
    "AddLoss": "AddLoss",
    "counter": "Counting",
    "moving mean": "Following",
    "metric in a layer": "Measuring",
    "function in a layer": "Nested",
    "positions": "Placed",
    "unique lookup": "Unique",
    "embedding_lookup_sparse": "Pooled",
    "mean of ragged": "Gathered",
    "boxes of rows": "Boxes",
    "running maximum": "Largest",
    "queue": "Queue",
    "moving sum": "Total",
    "rows counted": "Counted",
    "square of a mean": "SquareOfMean",
    "mean of squares": "MeanOfSquares",
    "mean that is used": "Centred",
}
VECTORS: Table = {
    "Dense": ('h = keras.layers.Dense(5, activation="tanh")(h)', 1),
    "Dense relu": ('h = keras.layers.Dense(6, activation="relu")(h)', 1),
    "LayerNormalization": ("h = keras.layers.LayerNormalization(epsilon=0.1)(h)", 1),
    "shared Dense": (
        'shared = keras.layers.Dense(h.shape[-1], activation="tanh")\nh = shared(shared(h))',
        1,
    ),
    "residual": ('h = keras.layers.Add()([h, keras.layers.Dense(h.shape[-1], activation="tanh")(h)])', 1),
    "regularizers": (
        'h = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.05), bias_regularizer="l1")(h)',
        1,
    ),
    "constraints": (
        'h = keras.layers.Dense(5, kernel_constraint=keras.constraints.MaxNorm(0.8), bias_constraint="non_neg")(h)',
        1,
    ),
    "AddLoss": ("h = AddLoss()(h)", 1),
    "activity regularizer": (
        'h = keras.layers.Dense(5, activation="tanh", activity_regularizer=keras.regularizers.L2(0.1))(h)',
        1,
    ),
    "not trainable": ('h = keras.layers.Dense(4, activation="tanh", trainable=False)(h)', 1),
    "BatchNormalization": ("h = keras.layers.BatchNormalization(momentum=0.8, epsilon=0.1)(h)", 1),
    "Dropout": ("h = keras.layers.Dropout(0.3, seed=NUMBER)(h)", 1),
    "GaussianNoise": ("h = keras.layers.GaussianNoise(0.1, seed=NUMBER)(h)", 1),
    "counter": ("h = Counting()(h)", 1),
    "moving mean": ("h = Following()(h)", 1),
    "metric in a layer": ("h = Measuring()(h)", 1),
    "function in a layer": ("h = Nested(5)(h)", 1),
    "inner model": (
        'inner = keras.Input((h.shape[-1],))\nh = keras.Model(inner, keras.layers.Dense(4, "tanh")(inner))(h)',
        1,
    ),
}
NO_MEANS = ("running maximum", "queue", "moving sum", "rows counted", "square of a mean")  # over rows
STATES: Table = {name: (f"h = {CLASSES[name]}()(h)", 1) for name in (*NO_MEANS, "mean of squares", "mean that is used")}
SPARSE: Table = {"sparse Dense": ('h = keras.layers.Dense(5, activation="tanh")(h)', 1)}
RAGGED: Table = {
    "embedding_lookup_sparse": ("h = Pooled()(h)", 1),
    "mean of ragged": ("h = Gathered()(h)", 1),
}
RAGGED_BOXES: Table = {"boxes of rows": ("h = Boxes()(h)", 1)}
UNIQUE: Table = {"unique lookup": ("h = Unique()(h)", 2)}
IMAGES: Table = {
    "Conv2D": ('h = keras.layers.Conv2D(3, 3, padding="same", activation="tanh")(h)', 3),
    "DepthwiseConv2D": ('h = keras.layers.DepthwiseConv2D(3, padding="same", activation="tanh")(h)', 3),
    "SeparableConv2D": ('h = keras.layers.SeparableConv2D(4, 3, padding="same", activation="tanh")(h)', 3),
    "MaxPooling2D": ('h = keras.layers.MaxPooling2D(2, padding="same")(h)', 3),
    "BatchNormalization": ("h = keras.layers.BatchNormalization(momentum=0.8, epsilon=0.1)(h)", 3),
    "GroupNormalization": ("h = keras.layers.GroupNormalization(1, epsilon=0.1)(h)", 3),
    "Conv2DTranspose": ('h = keras.layers.Conv2DTranspose(3, 2, strides=2, activation="tanh")(h)', 3),
    "counter": ("h = Counting()(h)", 3),
    "GlobalAveragePooling2D": ("h = keras.layers.GlobalAveragePooling2D()(h)", 1),
}
EMBEDDINGS: Table = {
    "Embedding": ("h = keras.layers.Embedding(12, 4)(h)", 2),
    "Embedding masked": ("h = keras.layers.Embedding(12, 4, mask_zero=True)(h)", 2),
    "Embedding regularized": ('h = keras.layers.Embedding(12, 4, embeddings_regularizer="l2")(h)', 2),
}
# Rows of tables in the place of "Embedding"; what they are compared with has them in its process.
TABLES: Table = {
    "table": (
        (
            "h = tfps.layers.Embedding(\n"
            "    12, 4, optimizer=keras.optimizers.Adagrad(0.1),\n"
            "    embeddings_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=7),\n)(h)"
        ),
        2,
    ),
    "table of any id": (
        (
            "h = tfps.layers.Embedding(\n"
            "    None, 4, optimizer=keras.optimizers.Adam(0.02),\n"
            "    embeddings_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=7),\n"
            ')(keras.ops.cast(h, "int64") * 2**50)'
        ),
        2,
    ),
}
SEQUENCES: Table = {
    "LSTM": ("h = keras.layers.LSTM(4, return_sequences=True)(h)", 2),
    "GRU": ("h = keras.layers.GRU(3, return_sequences=True)(h)", 2),
    "Bidirectional": ("h = keras.layers.Bidirectional(keras.layers.SimpleRNN(2, return_sequences=True))(h)", 2),
    "MultiHeadAttention": (
        "h = keras.layers.Add()([h, keras.layers.MultiHeadAttention(2, 3)(h, h)])",
        2,
    ),
    "causal attention": (
        (
            "h = keras.layers.LayerNormalization(epsilon=0.1)(\n"
            "    h + keras.layers.MultiHeadAttention(1, 4)(h, h, use_causal_mask=True)\n)"
        ),
        2,
    ),
    "ConvLSTM1D": (
        (
            "h = keras.layers.Reshape((h.shape[1], h.shape[2], 1))(h)\n"
            'h = keras.layers.ConvLSTM1D(2, 2, padding="same", return_sequences=True)(h)\n'
            "h = keras.layers.TimeDistributed(keras.layers.Flatten())(h)"
        ),
        2,
    ),
    "counter": ("h = Counting()(h)", 2),
    "positions": ("h = Placed()(h)", 2),
    "Conv1D": ('h = keras.layers.Conv1D(4, 2, padding="same", activation="tanh")(h)', 2),
    "LayerNormalization": ("h = keras.layers.LayerNormalization(epsilon=0.1)(h)", 2),
    "TimeDistributed": ('h = keras.layers.TimeDistributed(keras.layers.Dense(4, activation="tanh"))(h)', 2),
    "GlobalAveragePooling1D": ("h = keras.layers.GlobalAveragePooling1D()(h)", 1),
    "GlobalMaxPooling1D": ("h = keras.layers.GlobalMaxPooling1D()(h)", 1),
    "last LSTM": ("h = keras.layers.LSTM(4)(h)", 1),
}
