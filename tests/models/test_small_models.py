"""Models of Keras' applications, of keras_hub and of keras_rs, with two and three workers, beside plain Keras.

Those with batch normalization, and the one whose negatives are other rows, end equal on all ranks, near plain Keras.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import pytest
import test_programs
import test_taught
from test_programs import Results

MODELS = {
    "keras": ["convnext", "mobilenet", "efficientnet", "densenet", "nasnet", "efficientnet_v2"],
    "keras_hub": [
        *("bert", "gpt2", "t5", "whisper", "vit", "resnet"),
        *("llama", "mit", "pyramid", "segment_anything", "retinanet"),
    ],
    "keras_rs": ["dlrm", "distributed_embedding", "retrieval", "two_towers", "sasrec"],
}
TIMEOUT_S = 1100.0  # of one job with all models of a library
pytestmark = pytest.mark.timeout(TIMEOUT_S + 100)
Jobs = Callable[[str, int], Results]


def needs(library: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"needs {library}: pip install -e '.[models]'")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """The results of a library's models, in one job."""

    @functools.cache
    def results(library: str, workers: int) -> Results:
        pairs = [("small_models", name) for name in MODELS[library]]
        return test_programs.run(pairs, tmp_path_factory.mktemp(library), workers, timeout_s=TIMEOUT_S)

    return results


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    ("library", "name"),
    [pytest.param(library, name, marks=needs(library), id=name) for library, names in MODELS.items() for name in names],
)
def test_models_of_libraries_end_as_in_plain_keras(library: str, name: str, workers: int, jobs: Jobs) -> None:
    test_taught.check(name, jobs(library, workers))
