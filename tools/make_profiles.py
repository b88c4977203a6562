#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes tools/profiles/*.json: bytes from the architectures' formulas, times from a model of the accelerator.

`tools/make_profiles.py [--check]`; with --check nothing is written, and files that differ are an error.

Bytes are exact. Times are not measured: each layer costs its floating point operations at an effective rate, plus the
memory traffic of what is done element by element and of its weights. The constants below are those of the accelerator
of the P3 paper (Jayarajan et al. 2019, arXiv 1905.03960): an NVIDIA Quadro P4000, data sheet: 5.3 TFLOP/s float32, 243
GB/s.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile

from tools import model_profiles
from tools.model_profiles import ITEM_BYTES, Layer, Profile

FLOPS = 4.0e12  # 75 % of the data sheet's: large convolutions and matrix products
RECURRENT_FLOPS = 1.5e12  # one time step after the other, 64 rows each: small matrix products
MEMORY_BYTES_PER_S = 243e9
BATCH = 32  # images per worker
CNN_SOURCE = (
    "Bytes: trainable parameters as in keras.applications. Times computed, not measured: batch 32 of 224x224 images "
    "per worker on an NVIDIA Quadro P4000 (the accelerator of the P3 paper, arXiv 1905.03960; data sheet 5.3 TFLOP/s, "
    "243 GB/s), assumed to reach 4 TFLOP/s in products, plus memory traffic of element-wise work and weights; "
    "backward = 2 x forward, the first layer without the gradient of its input. "
)
# What is read or written per activation beside the products themselves.
VGG_PASSES = 2  # ReLU reads and writes
RESNET_PASSES = 5  # batch normalization reads twice and writes, ReLU reads and writes


def layer(
    name: str,
    *,
    parameters: int,
    multiply_adds: float,
    activations: float = 0,
    passes: int = 0,
    flops: float = FLOPS,
    first: bool = False,
    reads: float | None = None,
) -> Layer:
    """A layer from what a whole batch costs. `reads`: parameters read per forward pass, if not each of them once."""
    nbytes = parameters * ITEM_BYTES
    traffic = activations * passes * ITEM_BYTES + (nbytes if reads is None else reads * ITEM_BYTES)
    forward_s = 2 * multiply_adds / flops + traffic / MEMORY_BYTES_PER_S
    return Layer(name, round(forward_s, 9), round(forward_s * (1 if first else 2), 9), nbytes)


def vgg(name: str, convolutions: tuple[int, ...]) -> Profile:
    """Blocks of 3x3 convolutions, pooling by 2 after each, then 4096, 4096, 1000."""
    layers: list[Layer] = []
    size, channels = 224, 3
    for block, (width, count) in enumerate(zip((64, 128, 256, 512, 512), convolutions, strict=True), 1):
        for number in range(1, count + 1):
            weights = 9 * channels * width
            pixels = BATCH * size * size
            layers.append(
                layer(
                    f"block{block}_conv{number}",
                    parameters=weights + width,
                    multiply_adds=weights * pixels,
                    activations=width * pixels,
                    passes=VGG_PASSES,
                    first=not layers,
                )
            )
            channels = width
        size //= 2
    inputs = size * size * channels
    for title, width in (("fc1", 4096), ("fc2", 4096), ("predictions", 1000)):
        layers.append(
            layer(
                title, parameters=(inputs + 1) * width, multiply_adds=BATCH * inputs * width, activations=BATCH * width
            )
        )
        inputs = width
    return Profile(name, tuple(layers), CNN_SOURCE + "Pooling is not counted.")


def resnet50() -> Profile:
    """Version 1 as in Keras: convolutions have biases, the stride is in a block's first 1x1 convolution."""
    layers: list[Layer] = []

    def convolution(title: str, kernel: int, inputs: int, outputs: int, size: int) -> None:
        """With its batch normalization, whose scale and offset are trained."""
        weights, pixels = kernel * kernel * inputs * outputs, BATCH * size * size
        layers.append(
            layer(
                title,
                parameters=weights + 3 * outputs,
                multiply_adds=weights * pixels,
                activations=outputs * pixels,
                passes=RESNET_PASSES,
                first=not layers,
            )
        )

    convolution("conv1", 7, 3, 64, 112)
    channels = 64
    for stage, (width, blocks, size) in enumerate(((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)), 2):
        for block in range(1, blocks + 1):
            title = f"conv{stage}_block{block}"
            if block == 1:
                convolution(f"{title}_0", 1, channels, 4 * width, size)
            convolution(f"{title}_1", 1, channels, width, size)
            convolution(f"{title}_2", 3, width, width, size)
            convolution(f"{title}_3", 1, width, 4 * width, size)
            channels = 4 * width
    layers.append(
        layer(
            "predictions",
            parameters=(channels + 1) * 1000,
            multiply_adds=BATCH * channels * 1000,
            activations=BATCH * 49 * channels,  # of the pooling before it
            passes=1,
        )
    )
    chain = (
        "The residual topology is a chain here, the shortcut's convolution first; a convolution and its normalization "
        "are one layer."
    )
    return Profile("resnet50", tuple(layers), CNN_SOURCE + chain)


def sockeye() -> Profile:
    """LSTM encoder and decoder with MLP attention, Sockeye 1 with default sizes, trained on IWSLT15."""
    embed, hidden, batch = 512, 1024, 64
    source_words, target_words = 17191, 7709
    source_steps, target_steps = 25, 30
    source, target = batch * source_steps, batch * target_steps
    half = hidden // 2

    def recurrent(title: str, parameters: int, matrix: int, steps: int) -> Layer:
        """A matrix that is read anew in every time step."""
        products = matrix * batch * steps
        return layer(
            title, parameters=parameters, multiply_adds=products, flops=RECURRENT_FLOPS, reads=parameters * steps
        )

    def embedding(title: str, words: int, tokens: int, first: bool = False) -> Layer:
        """A table look-up; its gradient is dense (MXNet), so that backward writes a whole table."""
        forward_s = 2 * tokens * embed * ITEM_BYTES / MEMORY_BYTES_PER_S
        nbytes = words * embed * ITEM_BYTES
        backward_s = forward_s * (1 if first else 2) + nbytes / MEMORY_BYTES_PER_S
        return Layer(title, round(forward_s, 9), round(backward_s, 9), nbytes)

    birnn = 2 * 4 * half * (embed + half)
    scores = batch * source_steps * target_steps * hidden  # of the MLP attention
    layers = (
        embedding("source_embedding", source_words, source, first=True),
        recurrent("encoder_birnn", birnn + 2 * 2 * 4 * half, birnn, source_steps),
        layer("decoder_init", parameters=2 * (hidden + 1) * hidden, multiply_adds=2 * batch * hidden * hidden),
        embedding("target_embedding", target_words, target),
        layer(
            "attention",
            parameters=2 * hidden * hidden + hidden,
            multiply_adds=(source + target) * hidden * hidden + scores,
            activations=scores,
            passes=4,  # sum, tanh, weight, context
            flops=RECURRENT_FLOPS,
        ),
        recurrent("decoder_i2h", 4 * hidden * (embed + hidden + 1), 4 * hidden * (embed + hidden), target_steps),
        recurrent("decoder_h2h", 4 * hidden * (hidden + 1), 4 * hidden * hidden, target_steps),
        recurrent("decoder_hidden", hidden * (2 * hidden + 1), 2 * hidden * hidden, target_steps),
        layer(
            "output",
            parameters=target_words * (hidden + 1),
            multiply_adds=target * hidden * target_words,
            activations=target * target_words,
            passes=4,  # softmax
        ),
    )
    text = (
        "Sockeye 1 (RNN): sizes are the defaults of its arguments.py (embeddings 512, hidden 1024, 1 layer each, "
        "bidirectional encoder, MLP attention of 1024 units, batch 64 sentences). Assumed: vocabularies of IWSLT15 "
        "English to Vietnamese, 17191 and 7709 words; 25 and 30 tokens per sentence with padding; arrays as MXNet has "
        "them (an LSTM's two matrices apart), so that the source embedding is the heaviest, as the P3 paper "
        "(arXiv 1905.03960) says of its model's first layer. Times computed, not measured: NVIDIA Quadro P4000 "
        "(243 GB/s), assumed 4 TFLOP/s in large products and 1.5 TFLOP/s in those of one time step; a matrix is read "
        "in every time step; backward = 2 x forward."
    )
    return Profile("sockeye", layers, text)


def profiles() -> list[Profile]:
    """All that come with the tools."""
    return [vgg("vgg16", (2, 2, 3, 3, 3)), vgg("vgg19", (2, 2, 4, 4, 4)), resnet50(), sockeye()]


def main() -> None:
    """Writes, or compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not what would be written"
    )
    check = parser.parse_args().check
    for profile in profiles():
        path = model_profiles.FOLDER / f"{profile.name}.json"
        if check:
            with tempfile.TemporaryDirectory() as folder:
                wanted = pathlib.Path(folder, path.name)
                model_profiles.save(profile, wanted)
                if not path.exists() or path.read_text() != wanted.read_text():
                    sys.exit(f"{path.name} is not what tools/make_profiles.py writes: run it")
        else:
            path.parent.mkdir(exist_ok=True)
            model_profiles.save(profile, path)
        parameters = profile.nbytes // ITEM_BYTES
        print(f"{profile.name:10} {len(profile.layers):3} layers {parameters:12,} parameters {profile.compute_s:.3f} s")


if __name__ == "__main__":
    main()
