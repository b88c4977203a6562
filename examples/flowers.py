"""Trains VGG16 on a folder of flower images, one subfolder per kind.

python examples/flowers.py --data DIR                           # one process, pserver inside it
tfps_launch --workers 2 --pservers 2 examples/flowers.py --data DIR
python examples/flowers.py --size 32 --batch-size 8 --images 64 --epochs 2      # a quick try

DIR is laid out as in https://www.tensorflow.org/datasets/catalog/tf_flowers: DIR/daisy/*.jpg, DIR/roses/*.jpg and so
on. Without --data it trains on generated images, and says so.
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import tfps


def generated(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images of five kinds of blossoms, [count, size, size, 3] float32 from 0 to 255, and their kinds."""
    random = np.random.default_rng(1)
    kinds = random.integers(0, 5, count)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    images = np.empty((count, size, size, 3), np.float32)
    colors = np.array([[250, 250, 250], [250, 210, 40], [200, 30, 40], [240, 190, 20], [150, 60, 190]])
    for image, kind in zip(images, kinds, strict=True):
        left, top = random.uniform(-0.4, 0.4, 2)
        angle, distance = np.arctan2(y - top, x - left), np.hypot(x - left, y - top)
        blossom = distance < 0.35 + 0.15 * np.cos((kind + 3) * angle + random.uniform(0, 6))
        image[:] = random.normal((40, 110, 40), 15, (size, size, 3))
        image[blossom] = random.normal(colors[kind], 15, (int(blossom.sum()), 3))
    return images.clip(0, 255), kinds


def load(options: argparse.Namespace) -> tuple[tf.data.Dataset, int]:
    """Returns global batches (every worker takes its part of each), and the number of kinds."""
    if options.data is None:
        images, kinds = generated(options.images, options.size)
        dataset = tf.data.Dataset.from_tensor_slices((images, kinds)).shuffle(len(images), seed=1)
        return dataset.batch(options.batch_size, drop_remainder=True), 5
    size = (options.size, options.size)
    dataset = keras.utils.image_dataset_from_directory(
        options.data, image_size=size, batch_size=None, seed=1, verbose=False
    )
    return dataset.batch(options.batch_size, drop_remainder=True).prefetch(2), len(dataset.class_names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="DIR", help="folder of images; default: generated images")
    parser.add_argument("--size", type=int, default=224, help="images are scaled to this many pixels; at least 32")
    parser.add_argument("--batch-size", type=int, default=32, help="of the whole job")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--images", type=int, default=512, help="how many to generate without --data")
    options = parser.parse_args()

    keras.utils.set_random_seed(1)  # the same on all workers, so that they shuffle alike
    dataset, kinds = load(options)
    # Each worker decodes all images and takes its part of every batch. With more than a few workers write the images
    # into several TFRecord files and leave this out: then each worker reads different files.
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA

    strategy = tfps.Strategy()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((options.size, options.size, 3)),
                keras.layers.Rescaling(1 / 127.5, -1),
                keras.applications.VGG16(
                    weights=None, include_top=False, pooling="avg", input_shape=(options.size, options.size, 3)
                ),
                keras.layers.Dense(kinds),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"])

    is_first = strategy.rank == 0
    if is_first:
        print(f"images: {options.data or 'generated, because there is no --data DIR'}")
    start = time.perf_counter()
    history = model.fit(dataset.with_options(sharding), epochs=options.epochs, verbose=2 if is_first else 0)
    if is_first:
        seconds = (time.perf_counter() - start) / options.epochs
        accuracy = history.history["accuracy"][-1]
        print(f"accuracy={accuracy:.4f} workers={strategy.num_workers} seconds_per_epoch={seconds:.2f}")
    strategy.close()


if __name__ == "__main__":
    main()
