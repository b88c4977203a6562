"""Models that make images: with steps of their own, several optimizers, and no `call`; see taught.py."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from program import Job, Results
from taught import BATCH, OPTIONS, ROWS, L, digits, ends, images, noise, roughly

from tfps.types import Logs, Model, Optimizer, Structure, Value


def generator() -> Model:
    layers = [L.Dense(16, activation="tanh"), L.Dense(64), L.Reshape((8, 8, 1))]
    return keras.Sequential([keras.Input((4,)), *layers])


def discriminator() -> Model:
    layers = [L.Conv2D(4, 3, strides=2, padding="same"), L.LeakyReLU(negative_slope=0.2), L.Flatten(), L.Dense(1)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class Gan(keras.Model):
    """Real and made images in one batch; compiled with two optimizers and a loss; nothing can be called."""

    def __init__(self, generator: Model, discriminator: Model, seeds: keras.random.SeedGenerator | None = None) -> None:
        super().__init__()
        self.generator, self.discriminator, self.seeds = generator, discriminator, seeds
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Optimizer, g_optimizer: Optimizer, loss: keras.losses.Loss) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_function = d_optimizer, g_optimizer, loss

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, batch: Structure) -> Logs:
        real, latent = batch
        rows = tf.shape(real)[0]
        if self.seeds:
            latent = keras.random.normal((rows, 4), seed=self.seeds)
        both = tf.concat([self.generator(latent), real], 0)
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_function(labels, self.discriminator(both))
        variables = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_function(tf.zeros((rows, 1)), self.discriminator(self.generator(latent)))
        variables = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def _gan(job: Job, seeds: keras.random.SeedGenerator | None = None) -> Results:
    with job.scope():
        model = Gan(generator(), discriminator(), seeds)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.003), loss)
    dataset = tf.data.Dataset.from_tensor_slices((images(), noise(ROWS, 4))).batch(BATCH)
    fit = model.fit(dataset, epochs=2, verbose=0)
    return ends(model.generator, model.discriminator, fits=[fit])


def gan(job: Job) -> Results:
    return _gan(job)


def gan_with_noise(job: Job) -> Results:
    """Noise is each replica's own."""
    return roughly(_gan(job, keras.random.SeedGenerator(7)))


class Wgan(keras.Model):
    """Two steps of the critic, with a penalty on its gradient, for each of the generator; losses are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = generator(), discriminator()

    def compile(self, c_optimizer: Optimizer, g_optimizer: Optimizer) -> None:
        super().compile()
        self.c_optimizer, self.g_optimizer = c_optimizer, g_optimizer

    def penalty(self, real: Value, made: Value, between: Value) -> Value:
        mixed = real + between[:, :, None, None] * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            judged = self.critic(mixed, training=True)
        norms = tf.sqrt(tf.reduce_sum(tape.gradient(judged, [mixed])[0] ** 2, axis=[1, 2, 3]))
        return tf.reduce_mean((norms - 1.0) ** 2)

    def train_step(self, batch: Structure) -> Logs:
        real, latent, between = batch
        variables = self.critic.trainable_variables
        for _ in range(2):
            with tf.GradientTape() as tape:
                made = self.generator(latent, training=True)
                judged = self.critic(made, training=True), self.critic(real, training=True)
                c_loss = tf.reduce_mean(judged[0]) - tf.reduce_mean(judged[1])
                c_loss += 10.0 * self.penalty(real, made, between)
            self.c_optimizer.apply_gradients(zip(tape.gradient(c_loss, variables), variables, strict=True))
        variables = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(latent, training=True), training=True))
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, variables), variables, strict=True))
        return {"c_loss": c_loss, "g_loss": g_loss}


def wgan_gp(job: Job) -> Results:
    with job.scope():
        model = Wgan()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.5), keras.optimizers.SGD(0.01))
    between = abs(noise(ROWS, 1, seed=2)) % 1.0
    dataset = tf.data.Dataset.from_tensor_slices((images(), noise(ROWS, 4), between)).batch(BATCH)
    fit = model.fit(dataset, epochs=2, verbose=0)
    return ends(model.generator, model.critic, fits=[fit])


class Sampling(L.Layer):
    """Draws from a normal distribution, or takes what was drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: Structure) -> Value:
        mean, log_variance, *drawn = inputs
        drawn = drawn[0] if drawn else keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        return mean + keras.ops.exp(0.5 * log_variance) * drawn


class Vae(keras.Model):
    """Losses are means over rows of sums, tracked one by one."""

    def __init__(self, *, given: bool) -> None:
        super().__init__()
        image, drawn = keras.Input((8, 8, 1)), keras.Input((2,))
        hidden = L.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
        hidden = L.Dense(8, activation="relu")(L.Flatten()(hidden))
        mean, log_variance = L.Dense(2)(hidden), L.Dense(2)(hidden)
        sampled = Sampling()([mean, log_variance, *([drawn] if given else [])])
        self.encoder = keras.Model([image, drawn], [mean, log_variance, sampled])
        layers = [L.Dense(4 * 4 * 4, activation="relu"), L.Reshape((4, 4, 4))]
        layers.append(L.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"))
        self.decoder = keras.Sequential([keras.Input((2,)), *layers])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return self.trackers

    def train_step(self, batch: Structure) -> Logs:
        with tf.GradientTape() as tape:
            mean, log_variance, sampled = self.encoder(batch)
            wrong = keras.losses.binary_crossentropy(batch[0], self.decoder(sampled))
            made_loss = keras.ops.mean(keras.ops.sum(wrong, axis=(1, 2)))
            kl = -0.5 * (1 + log_variance - keras.ops.square(mean) - keras.ops.exp(log_variance))
            kl_loss = keras.ops.mean(keras.ops.sum(kl, axis=1))
            loss = made_loss + kl_loss
        variables = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for tracker, value in zip(self.trackers, (loss, made_loss, kl_loss), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def _vae(job: Job, *, given: bool) -> Results:
    with job.scope():
        model = Vae(given=given)
        model.compile(optimizer=keras.optimizers.Adam(0.003))
    dataset = tf.data.Dataset.from_tensor_slices((images(), noise(ROWS, 2))).batch(BATCH)
    fit = model.fit(dataset, epochs=2, verbose=0)
    return ends(model.encoder, model.decoder, fits=[fit])


def vae(job: Job) -> Results:
    return _vae(job, given=True)


def vae_with_noise(job: Job) -> Results:
    return roughly(_vae(job, given=False))


class VectorQuantizer(L.Layer):
    """Nearest entries of a code book; adds two losses; gradients pass it by."""

    def build(self, shape: Sequence[int]) -> None:
        self.entries = self.add_weight(shape=(shape[-1], 6), initializer="uniform", name="entries")

    def call(self, inputs: Value) -> Value:
        flat = keras.ops.reshape(inputs, (-1, inputs.shape[-1]))
        distances = keras.ops.sum(self.entries**2, 0) - 2.0 * keras.ops.matmul(flat, self.entries)
        found = keras.ops.one_hot(keras.ops.argmin(distances, 1), 6)
        found = keras.ops.reshape(keras.ops.matmul(found, keras.ops.transpose(self.entries)), keras.ops.shape(inputs))
        stop = keras.ops.stop_gradient
        self.add_loss(0.25 * keras.ops.mean((stop(found) - inputs) ** 2) + keras.ops.mean((found - stop(inputs)) ** 2))
        return inputs + stop(found - inputs)


class VqTrainer(keras.Model):
    def __init__(self, variance: float) -> None:
        super().__init__()
        layers = [L.Conv2D(4, 3, strides=2, padding="same", activation="relu"), L.Conv2D(3, 1), VectorQuantizer()]
        layers.append(L.Conv2DTranspose(1, 3, strides=2, padding="same"))
        self.inner, self.variance = keras.Sequential([keras.Input((8, 8, 1)), *layers]), variance
        self.total, self.made, self.quantized = (keras.metrics.Mean(name=name) for name in ("loss", "made", "vq"))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.total, self.made, self.quantized]

    def train_step(self, x: Value) -> Logs:
        with tf.GradientTape() as tape:
            made = keras.ops.mean((x - self.inner(x)) ** 2) / self.variance
            total = made + sum(self.inner.losses)
        variables = self.inner.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        self.total.update_state(total)
        self.made.update_state(made)
        self.quantized.update_state(sum(self.inner.losses))
        return {"loss": self.total.result(), "made": self.made.result(), "vq": self.quantized.result()}


def vq_vae(job: Job) -> Results:
    x = images()
    with job.scope():
        model = VqTrainer(float(x.var()))
        model.compile(optimizer=keras.optimizers.SGD(0.05))
    fit = model.fit(x, epochs=2, **OPTIONS)
    return ends(model.inner, fits=[fit])


class Diffusion(keras.Model):
    """Predicts noise; a second network follows the first as a moving average; normalizes by adapted statistics."""

    def __init__(self) -> None:
        super().__init__()
        noisy, rate = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
        hidden = L.Concatenate()([L.Conv2D(4, 1)(noisy), L.UpSampling2D(8)(rate)])
        inner = L.Conv2D(5, 3, padding="same", activation="swish")(hidden)
        hidden = L.Add()([L.Conv2D(5, 3, padding="same")(inner), hidden])
        self.network = keras.Model([noisy, rate], L.Conv2D(1, 1, kernel_initializer="zeros")(hidden))
        self.moving = keras.models.clone_model(self.network)
        self.moving.set_weights(self.network.get_weights())
        self.normalizer = L.Normalization()

    def compile(self, **options: Optimizer) -> None:
        super().compile(**options)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.noise_tracker, self.image_tracker]

    def steps(self, batch: Structure, network: Model, *, training: bool) -> tuple[Value, Value]:
        clean, drawn, time = batch
        clean = self.normalizer(clean, training=training)
        angle = 0.1 + 1.3 * time[:, :, None, None]
        signal, rate = tf.cos(angle), tf.sin(angle)
        mixed = signal * clean + rate * drawn
        guessed = network([mixed, rate**2], training=training)
        image = (mixed - rate * guessed) / signal
        return self.loss(drawn, guessed), self.loss(clean, image)

    def train_step(self, batch: Structure) -> Logs:
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.steps(batch, self.network, training=True)
        variables = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(noise_loss, variables), variables, strict=True))
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        for weight, moving in zip(self.network.weights, self.moving.weights, strict=True):
            moving.assign(0.9 * moving + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, batch: Structure) -> Logs:
        noise_loss, image_loss = self.steps(batch, self.moving, training=False)
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        return {m.name: m.result() for m in self.metrics}


def diffusion(job: Job) -> Results:
    with job.scope():
        model = Diffusion()
        model.normalizer.adapt(images())
        model.compile(optimizer=keras.optimizers.AdamW(0.003, weight_decay=0.01), loss=keras.losses.MeanAbsoluteError())
    dataset = (images(), noise(ROWS, 8, 8, 1), abs(noise(ROWS, 1, seed=2)) % 1.0)
    fit = model.fit(tf.data.Dataset.from_tensor_slices(dataset).batch(BATCH), epochs=2, verbose=0)
    return ends(model.network, model.moving, fits=[fit])


def autoencoder(job: Job) -> Results:
    """Denoises, with every convolutional layer that decoders use; trained by `fit`, then its encoder by itself."""
    with job.scope():
        image = keras.Input((8, 8, 1))
        h = L.MaxPooling2D(2)(L.Conv2D(4, 3, activation="relu", padding="same")(image))
        code = L.DepthwiseConv2D(3, padding="same")(h)
        h = L.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(code)
        h = L.Concatenate()([h, L.UpSampling2D(2)(code)])
        model = keras.Model(image, L.Conv2D(1, 3, activation="sigmoid", padding="same")(h))
        model.compile("adam", loss="binary_crossentropy")
    x = images()
    noisy = (x + 0.2 * noise(ROWS, 8, 8, 1)).clip(0, 1)
    fit = model.fit(noisy, x, epochs=2, validation_data=(noisy[:10], x[:10]), **OPTIONS)
    with job.scope():
        encoder = keras.Model(image, L.Dense(10)(L.Flatten()(code)))
        encoder.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    again = encoder.fit(x, digits()[1], **OPTIONS)
    return ends(model, encoder, fits=[fit, again], predicted=model.predict(noisy[:9], verbose=0))
