"""The wall clock may be set while a job runs: nothing waits by it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jobs
import pytest

PACKAGE = jobs.ROOT / "tfps"
SHOWN = {"pserver/server.py", "runtime/step_spans.py", "runtime/trace_run.py", "wire/control.py"}  # in captures
SHOWN.add("keras_hooks/checkpoint.py")  # compares it with files, for a warning


def test_only_what_captures_show_is_of_the_wall_clock() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\b|\bdatetime\b|from time import", path.read_text("utf-8"))
    }
    assert found == SHOWN


@pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("cc"), reason="needs Linux and a compiler")
@pytest.mark.parametrize(
    ("shared", "transport"),
    [("1", "auto"), *(pytest.param("0", transport, marks=pytest.mark.long) for transport in ("tcp", "grpc"))],
)
def test_jumps_of_the_wall_clock_stall_no_exchange_and_no_wait(shared: str, transport: str, tmp_path: Path) -> None:
    library, offset = tmp_path / "jumping_clock.so", tmp_path / "offset"
    source = Path(jobs.__file__).with_name("jumping_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset.write_bytes(bytes(8))
    clock = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    helpers = {"PYTHONPATH": f"{jobs.ROOT}:{source.parent}", "TFPS_SHARED_MEMORY": shared, "TFPS_TRANSPORT": transport}
    serve = ("-m", "tfps.pserver.cli", "--host=127.0.0.1", "--port=0", "--workers=2")
    with jobs.python(*serve, **clock) as pserver:
        assert pserver.stdout is not None
        address = pserver.stdout.readline().split()[3]
        script = Path(__file__).with_name("wall_clock.py")
        with jobs.python(str(script), address, **clock, **helpers) as workers:
            said, errors = workers.communicate(timeout=jobs.DEADLINE_S)
    assert "after 2 s not declared its variables: rank 1" in said, errors
    assert workers.returncode == 0
