"""Programs of the kinds that Keras' guides and examples teach, with two and three workers, beside plain Keras.

What the programs do is in the modules named here. Their rows divide by no number of workers, and the last batch has
fewer rows than there are workers. Ranks always end bitwise equal; where a step is a mean over
rows, as plain Keras does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import test_programs
from test_programs import Results

PROGRAMS = {
    "taught_generative": [
        *("gan", "gan_with_noise", "wgan_gp", "vae", "vae_with_noise", "vq_vae", "diffusion", "autoencoder"),
    ],
    "taught_representations": [
        *("masked_autoencoder", "contrastive", "barlow_twins", "bootstrapped", "distillation", "triplets", "siamese"),
        "supervised_contrastive",
    ],
    "taught_sequences": [
        *("ctc", "ctc_endpoint", "seq2seq", "attentive_seq2seq", "text_transformer", "small_gpt", "experts"),
        *("switch_experts", "sorted_by_recurrence", "convolutional_recurrence"),
    ],
    "taught_guides": [
        *("loop_from_scratch", "loop_from_scratch_eager", "loop_with_run", "loop_with_run_divided", "reptile"),
        *("weighted_step", "low_level_step", "subclassed", "callbacks", "evaluated_in_callbacks", "endpoint"),
        *("several_outputs", "built_in", "moving_mean"),
    ],
    "taught_losses": [
        *("scalar_function", "scalar_function_of_keras", "scalar_subclass", "subclass_of_rows", "rows_function"),
        *("weighted_mean", "summed", "dice_of_rows", "dice_of_batches", "tversky_of_rows", "mixed_outputs", "tracked"),
        *("tracked_with_weights", "tracked_scalar", "mean_of_a_function", "computed", "two_gradients"),
    ],
    "taught_vectors": [
        *("siamese_network", "siamese_network_eagerly", "vectors", "vectors_accumulated", "vectors_scaled"),
        *("vectors_in_several_steps", "vectors_that_divide", "returned", "counted", "positives", "masked_function"),
        *("numbers_of_batches", "functions_of_batches", "losses_of_outputs"),
    ],
}
TOLERANCE = 1e-5  # of the largest number of all weights of a model, or of a History
NEAR = 0.75  # of the same, for losses that are not to be those of plain Keras: pairs are fewer in smaller batches
pytestmark = pytest.mark.timeout(1200)


def check(name: str, results: Results) -> None:
    """Ranks bitwise equal, and plain Keras within rounding, or near it."""
    test_programs.check_ranks(name, results)
    plain, rank, *_ = (result[name] for result in results)
    for key in (key for key in plain if not key.startswith(("own", "ranks")) or key.startswith("ranks history/")):
        expected, found = np.asarray(plain[key]), np.asarray(rank[key])
        assert found.shape == expected.shape, f"{key}: {found}, plain Keras {expected}"
        if expected.size:
            # Some gradients are nothing but rounding, as of keys of attention: weights are measured together.
            alike = (
                [each for each in plain if each.rpartition("/")[0] == key.rpartition("/")[0]] if "/" in key else [key]
            )
            largest = max(np.abs(np.asarray(plain[each])).max(initial=0.0) for each in alike)
            difference = np.abs(found - expected).max() / max(largest, 1e-30)
            tolerated = NEAR if key.startswith("ranks") else TOLERANCE
            assert difference < tolerated, f"{key} differs by {difference}: {found}, plain {expected}"


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Results]:
    """The results of a module's programs, in one job."""

    @functools.cache
    def results(module: str, workers: int) -> Results:
        pairs = [(module, name) for name in PROGRAMS[module]]
        return test_programs.run(pairs, tmp_path_factory.mktemp(module), workers)

    return results


@pytest.mark.long
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PROGRAMS.items() for name in names])
@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_taught_ends_as_in_plain_keras(
    module: str, name: str, workers: int, long: Callable[[str, int], Results]
) -> None:
    check(name, long(module, workers))
