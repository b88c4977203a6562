"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import preloaded
import pytest

from tfps.types import Argument

if TYPE_CHECKING:
    from jobs import Cluster

    import tfps
    from tools.certificates import Authority, Certificate

# TensorFlow reads this when it is imported, here and in the processes that tests start: only warnings and errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

# A shell that starts the tests in the background makes them, and the processes that they start, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, so that a failure is due to a change; new ones with `tools/test.sh --long`. No limits of
# time: machines are busy.
_COMMON: dict[str, Argument] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("same", derandomize=True, **_COMMON)
hypothesis.settings.register_profile("new", **_COMMON)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the first process of the test run, which starts the others
        folder = tempfile.TemporaryDirectory(prefix="tfps-tests-")
        config.add_cleanup(folder.cleanup)
        preloaded.share(Path(folder.name))
    hypothesis.settings.load_profile("same" if config.getoption("markexpr") == "not long and not gpu" else "new")


# Files that take longest begin, so that all processes of the suite (tools/test.sh) end together.
_LONGEST = (
    *("test_load.py", "test_chaos.py", "test_fuzz_server.py"),
    *("test_rows.py", "test_programs.py", "test_exactness.py", "test_fuzz_programs.py", "test_remote_bucket.py"),
    *("test_training.py", "test_tables.py", "test_embedding.py", "test_lost_tables.py", "test_tables_saving.py"),
    *("test_semantics.py", "test_remote_updates.py", "test_local_programs.py", "test_divergence.py", "test_workers.py"),
    *("test_combinations.py", "test_machine.py", "test_strategy.py", "test_failures.py", "test_async.py"),
    *("test_input.py", "test_interrupted.py", "test_unseeded.py", "test_outer.py", "test_worker_starts.py"),
    "test_worker_ends.py",
)


def pytest_collection_finish() -> None:
    """No collection of garbage walks through what has been imported, which takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: position for position, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows where all threads of tfps are: one may have waited for another, in this process."""
    report = yield
    if call.when == "call" and report.failed:
        for identity, frame in sys._current_frames().items():
            name = next((thread.name for thread in threading.enumerate() if thread.ident == identity), "")
            if "/tfps/" in (text := "".join(traceback.format_stack(frame))):
                report.sections.append((f"thread {name}", text))
    return report


@pytest.fixture(autouse=True)
def _same_signal_handlers() -> Iterator[None]:
    """The tests after this one in its process may send the same signals."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.fixture
def strategy() -> Iterator[tfps.Strategy]:
    """One worker, whose pserver is embedded."""
    import tfps  # here: most tests need no TensorFlow

    strategy = tfps.Strategy()
    yield strategy
    strategy.close()


@pytest.fixture(params=["both", pytest.param("grpc", marks=pytest.mark.long)])
def remote(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tfps.Strategy]:
    """One worker, two pservers, many small slices: over a data connection and shared memory, or over gRPC."""
    import jobs

    import tfps
    from tfps.pserver.server import ParameterServer

    jobs.use(request.param, monkeypatch)
    servers = [ParameterServer("127.0.0.1", 0, workers=1) for _ in range(2)]
    config = tfps.Config(slice_bytes=1024, window_bytes=2048)
    strategy = tfps.Strategy([server.address for server in servers], config=config)
    yield strategy
    strategy.close()
    for server in servers:
        server.stop()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Pservers and workers that end with the test."""
    from jobs import Cluster

    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Token -> path of its file."""
    from guarded import OTHER, SECRET

    found = {"": ""}
    for number, text in enumerate((SECRET, OTHER)):
        path = tmp_path / f"token{number}"
        path.touch(0o600)
        path.write_text(text)
        found[text] = str(path)
    return found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that signs certificates of pservers and workers. Needs the command openssl."""
    from tools.certificates import Authority

    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def own(authority: Authority) -> Certificate:
    """Of a pserver."""
    return authority.sign("pserver")
