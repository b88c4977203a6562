"""The Keras expressions that stand for names in a case: optimizers, losses, metrics, callbacks."""

from __future__ import annotations

from tools.fuzzing.cases import Case, Optimizer

# Epsilons are large: where a gradient is next to nothing, what is rounded would decide the direction of an update.
OPTIMIZERS = {
    "SGD": "SGD({rate}{options})",
    "Adam": "Adam({rate}, epsilon=0.01{options})",
    "AdamW": "AdamW({rate}, epsilon=0.01{options})",
    "RMSprop": "RMSprop({rate}, epsilon=0.01{options})",
    "Adagrad": "Adagrad({rate}, epsilon=0.01{options})",
    "Adadelta": "Adadelta({rate}, epsilon=0.01{options})",
    "Adamax": "Adamax({rate}, epsilon=0.01{options})",
    "Nadam": "Nadam({rate}, epsilon=0.01{options})",
    "Ftrl": "Ftrl({rate}{options})",
    "Lamb": "Lamb({rate}, epsilon=0.01{options})",
    "Lion": "Lion({rate}{options})",
    "Adafactor": "Adafactor({rate}{options})",
    "Muon": "Muon({rate}{options})",
    "ScheduleFreeAdamW": "ScheduleFreeAdamW({rate}, epsilon=0.01{options})",
}
RATES = {"SGD": 0.05, "Adadelta": 0.5, "Lion": 0.001}
SCHEDULES = {
    "ExponentialDecay": "keras.optimizers.schedules.ExponentialDecay({rate}, 2, 0.7)",
    "CosineDecay": "keras.optimizers.schedules.CosineDecay({rate}, 6)",
    "PiecewiseConstantDecay": "keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [{rate}, {rate} / 2, {rate}])",
}
CLIPPING = {"clipnorm": "clipnorm=0.2", "clipvalue": "clipvalue=0.05", "global_clipnorm": "global_clipnorm=0.3"}
LOSSES = {
    ("regression", "default loss"): "keras.losses.MeanSquaredError({options})",
    ("regression", "MeanAbsoluteError"): "keras.losses.MeanAbsoluteError({options})",
    ("regression", "Huber"): "keras.losses.Huber({options})",
    ("regression", "LogCosh"): "keras.losses.LogCosh({options})",
    ("regression", "scalar function"): "mean_of_squares",
    ("regression", "scalar subclass"): "ScalarLoss()",
    ("regression", "subclass of rows"): "RowsLoss({options})",
    ("regression", "function of rows"): "squares_of_rows",
    ("binary", "default loss"): "keras.losses.BinaryCrossentropy({options})",
    ("binary", "BinaryFocalCrossentropy"): "keras.losses.BinaryFocalCrossentropy({options})",
    ("binary", "Hinge"): "keras.losses.Hinge({options})",
    ("binary", "scalar function"): "mean_of_squares",
    ("binary", "Dice of rows"): "keras.losses.Dice(axis=(1,))",
    ("binary", "Dice of the batch"): "keras.losses.Dice()",
    ("binary", "Tversky of rows"): "keras.losses.Tversky(axis=(1,))",
    ("classes", "default loss"): "keras.losses.SparseCategoricalCrossentropy({options})",
    ("classes", "scalar function"): "mean_of_classes",
}
OTHER_LOSSES = {
    "mse": '"mse"',
    "scalar function of the other": "mean_of_squares",
    "subclass of the other": "ScalarLoss()",
}
SCALAR = {"scalar function", "scalar subclass"}  # one number for all rows, which is their mean
NOT_OF_ROWS = {*SCALAR, "Dice of the batch"}
OF_VECTORS = {*NOT_OF_ROWS, "Dice of rows", "Tversky of rows"}  # not of sequences
WITHOUT_REDUCTION = {*SCALAR, "function of rows", "Dice of rows", "Dice of the batch", "Tversky of rows"}
METRICS = {
    "mae": '"mae"',
    "RootMeanSquaredError": "keras.metrics.RootMeanSquaredError()",
    "R2Score": "keras.metrics.R2Score()",
    "CosineSimilarity": "keras.metrics.CosineSimilarity()",
    "BinaryAccuracy": "keras.metrics.BinaryAccuracy()",
    "AUC": "keras.metrics.AUC(num_thresholds=20)",
    "Precision": "keras.metrics.Precision()",
    "F1Score": "keras.metrics.F1Score(threshold=0.5)",
    "accuracy": '"accuracy"',
    "TopK": "keras.metrics.SparseTopKCategoricalAccuracy(2)",
    "SparseCategoricalCrossentropy": "keras.metrics.SparseCategoricalCrossentropy(from_logits=True)",
    "Rows": 'Rows("z_rows")',
    "mean over the batch": "mean_over_batch",
    "part of the batch": "part_of_batch",
    "MeanIoU": "keras.metrics.MeanIoU(num_classes=4, sparse_y_pred=False)",
}
OF_BATCHES = {"mean over the batch": "mean_over_batch", "part of the batch": "part_of_batch"}  # functions
CALLBACKS = {
    "EarlyStopping": (
        'keras.callbacks.EarlyStopping("{monitor}", min_delta=0.003, patience=1, restore_best_weights=True)'
    ),
    "ReduceLROnPlateau": (
        'keras.callbacks.ReduceLROnPlateau("{monitor}", min_delta=0.003, patience=0, factor=0.5, min_lr=0.001)'
    ),
    "LearningRateScheduler": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)",
    "ModelCheckpoint": 'keras.callbacks.ModelCheckpoint(job.path("{number}-epoch{{epoch}}.keras"))',
    "ModelCheckpoint best": (
        'keras.callbacks.ModelCheckpoint(job.path("{number}-best.weights.h5"), monitor="{monitor}", '
        "save_best_only=True, save_weights_only=True)"
    ),
    "checkpoint every 2 batches": (
        'keras.callbacks.ModelCheckpoint(job.path("{number}-batch{{batch}}.weights.h5"), save_freq=2, '
        "save_weights_only=True)"
    ),
    "BackupAndRestore": 'keras.callbacks.BackupAndRestore(job.path("backup{number}"))',
    "SwapEMAWeights": "keras.callbacks.SwapEMAWeights()",
    "SwapEMAWeights on epochs": "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "EarlyStopping by a baseline": (
        'keras.callbacks.EarlyStopping("{monitor}", baseline=0.5, patience=2, start_from_epoch=1)'
    ),
    "ModelCheckpoint from a threshold": (
        'keras.callbacks.ModelCheckpoint(job.path("{number}-threshold.weights.h5"), monitor="{monitor}", '
        "save_best_only=True, save_weights_only=True, initial_value_threshold=0.6)"
    ),
    "CSVLogger": 'keras.callbacks.CSVLogger(job.path(f"log{number}.{{job.rank}}.csv"))',
    "LambdaCallback": (
        "keras.callbacks.LambdaCallback("
        'on_epoch_end=lambda epoch, logs: job.found.update({{f"seen/{number}/lambda {{epoch}}/{{key}}": '
        "np.asarray(value) for key, value in logs.items()}}))"
    ),
    "TensorBoard": 'keras.callbacks.TensorBoard(job.path(f"board{number}.{{job.rank}}"), histogram_freq=1)',
    "TerminateOnNaN": "keras.callbacks.TerminateOnNaN()",
}


def loss_of(case: Case, reduction: str = "") -> str:
    """The expression of its loss; `reduction` replaces the one that the case has."""
    options = ["from_logits=True"] if case.network.task == "classes" else []
    reduction = reduction or case.reduction
    if reduction != "sum_over_batch_size":
        options.append(f'reduction="{reduction}"')
    return LOSSES[case.network.task, case.loss].format(options=", ".join(options))


def optimizer(chosen: Optimizer, *, parts: str = "") -> str:
    """The expression that makes it; `parts` divides what it clips by."""
    rate = str(RATES.get(chosen.name, 0.01))
    if chosen.schedule != "constant":
        rate = SCHEDULES[chosen.schedule].format(rate=rate)
    options = []
    if chosen.momentum:
        options.append("momentum=0.8")
    if chosen.clipping != "no clipping":
        options.append(CLIPPING[chosen.clipping] + parts)
    if chosen.ema:
        options.append(f"use_ema=True, ema_momentum=0.8, ema_overwrite_frequency={chosen.ema}")
    if chosen.weight_decay:
        options.append("weight_decay=0.01")
    if chosen.accumulation > 1:
        options.append(f"gradient_accumulation_steps={chosen.accumulation}")
    made = OPTIMIZERS[chosen.name].format(rate=rate, options="".join(f", {option}" for option in options))
    text = f"keras.optimizers.{made}"
    if chosen.loss_scaling:
        text = f"keras.optimizers.LossScaleOptimizer({text}, initial_scale=256.0, dynamic_growth_steps=2)"
    return text
