"""The notebook in examples/ shows what it prints when it is run, and what its text says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import jobs
import pytest

from tfps.types import Json

TWO_WORKERS = jobs.ROOT / "examples" / "two_workers.ipynb"
CELL_S = 600
LINE = re.compile(r"rank (\d) of (\d): accuracy ([0-9.]+), checksum of weights ([0-9a-f]{8})$", re.MULTILINE)
PLACES = re.compile(r"(?<![\w/.])/(?:tmp|root|home|work|opt|usr|var|Users)/\S*|\S*site-packages\S*")
needs_jupyter = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel: pip install '.[release]'",
)


def code_cells(notebook: Json) -> list[Json]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(notebook: Json) -> str:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in outputs]
    return "\n".join("".join(text) for text in texts)  # a file has lists of lines


def check_what_it_shows(notebook: Json) -> None:
    said = printed(notebook)
    (alone, *both) = sorted(LINE.findall(said), key=lambda found: (found[1], found[0]))
    assert [(rank, workers) for rank, workers, _, _ in (alone, *both)] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert both[0][3] == both[1][3]  # the same weights, bit for bit, as the text says
    assert all(float(accuracy) > 0.9 for _, _, accuracy, _ in (alone, *both))
    assert "tfps_launch: tensorboard --logdir logs\n" in said
    assert "tfps: recorded 11 steps, 10 to 20" in said
    assert "ms computing" in said


def test_it_was_run_from_top_to_bottom_and_shows_what_its_text_says() -> None:
    assert [*TWO_WORKERS.parent.glob("*.ipynb")] == [TWO_WORKERS]
    notebook = json.loads(TWO_WORKERS.read_text(encoding="utf-8"))
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert PLACES.findall(printed(notebook)) == [], "outputs must not name a machine's folders"
    check_what_it_shows(notebook)


@pytest.mark.long
@pytest.mark.timeout(2 * CELL_S)
@needs_jupyter
def test_it_runs_again(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    environment = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    again = nbformat.read(TWO_WORKERS, as_version=4)
    client = NotebookClient(again, timeout=CELL_S, startup_timeout=CELL_S, resources={"metadata": {"path": tmp_path}})
    check_what_it_shows(client.execute(env=environment))
