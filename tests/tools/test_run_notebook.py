"""tools/run_notebook.py, and that the notebook in examples/ shows what it prints when it is run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tfps.types import Argument
from tools.run_notebook import (
    CELL_S,
    NOTEBOOKS,
    ROOT,
    Notebook,
    NotebookError,
    code_cells,
    main,
    named_places,
    printed,
    read,
)

TWO_WORKERS = ROOT / "examples" / "two_workers.ipynb"
needs_jupyter = pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None or importlib.util.find_spec("ipykernel") is None,
    reason="needs nbclient and ipykernel: pip install '.[release]'",
)
LINE = re.compile(r"rank (\d) of (\d): accuracy ([0-9.]+), checksum of weights ([0-9a-f]{8})$", re.MULTILINE)


def of_cells(*sources: str) -> Notebook:
    """A notebook that was not run."""
    empty: dict[str, Argument] = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [{**empty, "id": f"cell-{index}", "source": source} for index, source in enumerate(sources)]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def check_what_two_workers_shows(notebook: Notebook) -> None:
    said = "\n".join(printed(cell) for cell in code_cells(notebook))
    (alone, *both) = sorted(LINE.findall(said), key=lambda found: (found[1], found[0]))
    assert [(rank, workers) for rank, workers, _, _ in (alone, *both)] == [("0", "1"), ("0", "2"), ("1", "2")]
    assert both[0][3] == both[1][3]  # the same weights, bit for bit, as the text says
    assert all(float(accuracy) > 0.9 for _, _, accuracy, _ in (alone, *both))
    assert "tfps_launch: tensorboard --logdir logs\n" in said
    assert "tfps: recorded 11 steps, 10 to 20" in said
    assert "ms computing" in said


def test_every_notebook_is_run_by_default() -> None:
    assert sorted((ROOT / "examples").glob("*.ipynb")) == NOTEBOOKS


def test_the_notebook_was_run_from_top_to_bottom_and_shows_what_its_text_says() -> None:
    notebook = read(TWO_WORKERS)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert named_places(notebook) == []
    check_what_two_workers_shows(notebook)


def test_names_of_the_machine_are_found_in_outputs_only() -> None:
    notebook = of_cells("open('/tmp/file')")
    assert named_places(notebook, "file") == []
    said = (
        "at /home/me/x.py, docs/tmp/file and https://example.org/home/, on node-1: not node-10, node-1.x or mynode-1\n"
    )
    code_cells(notebook)[0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [said]}]
    assert named_places(notebook) == ["/home/me/x.py,"]
    assert named_places(notebook, "node-1") == ["/home/me/x.py,", "node-1"]


def test_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.ipynb").write_text('{"nbformat": 3}')
    with pytest.raises(NotebookError, match="is not a notebook of format version 4"):
        read(tmp_path / "old.ipynb")


@pytest.mark.long
@pytest.mark.timeout(2 * CELL_S)
@needs_jupyter
def test_the_notebook_runs_again(tmp_path: Path) -> None:
    copy = tmp_path / "copy.ipynb"
    copy.write_text(TWO_WORKERS.read_text(encoding="utf-8"), encoding="utf-8")
    assert main([str(copy)]) == 0
    again, committed = read(copy), read(TWO_WORKERS)
    check_what_two_workers_shows(again)
    # The file is what the program writes, but for the outputs.
    for notebook in (again, committed):
        for cell in code_cells(notebook):
            del cell["outputs"]
    assert again == committed


@pytest.mark.long
@needs_jupyter
@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (("1 / 0",), "ZeroDivisionError"),
        (("%%bash\nexit 3",), "returned non-zero exit status 3"),
        (("import os", "print(os.getcwd())"), "outputs must not name this machine, got /"),
    ],
    ids=["raises", "program fails", "names a place"],
)
def test_a_notebook_that_cannot_be_kept_stays_as_it_was(
    cells: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import nbformat

    path = tmp_path / "some.ipynb"
    nbformat.write(nbformat.from_dict(of_cells(*cells)), path)
    before = path.read_bytes()
    assert main([str(path)]) == 1
    assert message in capsys.readouterr().err
    assert path.read_bytes() == before
