#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Runs notebooks from top to bottom and keeps what they print: `tools/run_notebook.py [NOTEBOOK ...]`.

Each runs in an empty folder, where it may leave files, with this environment's programs on PATH. Fails, and changes
nothing, if a cell raises or if an output names this machine. Needs the extra "release".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from tfps.types import Argument

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [ROOT / "examples" / "two_workers.ipynb"]
CELL_S = 600  # for one cell
# Places of files: a notebook that was run elsewhere shall read the same.
_PLACES = re.compile(r"(?<![\w/.])/(?:tmp|root|home|work|opt|usr|var|Users)/\S*|\S*site-packages\S*")

Notebook: TypeAlias = dict[str, Argument]  # version 4 of the format, as JSON


class NotebookError(Exception):
    """A notebook cannot be kept as it is; the message says why."""


def run(notebook: Notebook) -> Notebook:
    """The notebook with the outputs of a fresh run.

    Raises:
        NotebookError: a cell has raised, or has taken longer than CELL_S seconds; the message has its traceback.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError

    with tempfile.TemporaryDirectory(prefix="tfps-notebook-") as folder:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TFPS_")}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{inherited.get('PATH', os.defpath)}"
        client = NotebookClient(
            nbformat.reads(json.dumps(notebook), as_version=4),
            timeout=CELL_S,
            startup_timeout=CELL_S,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        try:
            done: Notebook = client.execute(env={**inherited, "PATH": programs, "IPYTHONDIR": folder})
        except (CellExecutionError, CellTimeoutError) as error:
            raise NotebookError(str(error)) from None
    about = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {**done, "metadata": about}


def code_cells(notebook: Notebook) -> list[dict[str, Argument]]:
    """The cells that can be run, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Argument]) -> str:
    """What a cell has printed or shown, as text."""
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell["outputs"]]
    return "".join("".join(text) for text in texts)  # a file has lists of lines


def named_places(notebook: Notebook, host: str = "") -> list[str]:
    """Paths of a machine in the outputs, and `host`, its name, if that is given."""
    text = "\n".join(printed(cell) for cell in code_cells(notebook))
    names = re.findall(rf"(?<![\w.]){re.escape(host)}(?![\w.])", text) if host else []
    return [*_PLACES.findall(text), *names]


def read(path: Path) -> Notebook:
    """
    Raises:
        NotebookError: the file is not a notebook of version 4.
    """
    loaded = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(loaded, dict) or loaded.get("nbformat") != 4:
        raise NotebookError("it is not a notebook of format version 4; save it with Jupyter again")
    return loaded


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; its exit code."""
    import nbformat

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args(arguments).notebooks:
        try:
            done = run(read(path))
            if found := named_places(done, socket.gethostname()):
                raise NotebookError(f"outputs must not name this machine, got {', '.join(found)}")
        except (NotebookError, OSError, ValueError) as error:
            print(f"run_notebook: {path}: {error}", file=sys.stderr)
            return 1
        nbformat.write(nbformat.from_dict(done), path)
        print(f"run_notebook: wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
