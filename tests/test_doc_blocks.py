"""Code in README.md and docs/ is code: it parses, names what there is, and runs (those marked "long").

Pages that need a cluster run in tests/launch/test_pages.py and tests/ray/test_page.py.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command_lines
import doc_blocks
import jobs
import mpi
import pytest
import yaml
from doc_blocks import ROOT, Block

import tfps
import tfps.ray
from tools.certificates import Authority

HERE = ROOT / "tests" / "doc_pages"
LANGUAGES = {"", "python", "sh", "dockerfile", "promql", "yaml"}
MOST_NOT_RUN = 10
DEADLINE_S = 500.0
PORT = 7070  # of pservers in the documents
HOSTS = {"10.0.0.4": "127.0.0.4", "10.0.0.5": "127.0.0.5"}

with_python = [
    page
    for page in doc_blocks.PAGES
    if page.name != "ray.md"  # which runs on a cluster: tests/ray/test_page.py
    and any(not (b.reason or b.file) for b in doc_blocks.blocks(page, "python"))
]
with_shell = [
    page
    for page in doc_blocks.PAGES
    if page.name not in ("slurm.md", "ssh.md")  # which need a cluster: tests/launch/test_pages.py
    and any(not b.reason for b in doc_blocks.blocks(page, "sh"))
]
ALL = [block for page in doc_blocks.PAGES for block in doc_blocks.blocks(page)]


def of(language: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in ALL if block.language == language], ids=str)


def by_page(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def test_blocks_are_of_languages_that_are_tested() -> None:
    assert not [str(block) for block in ALL if block.language not in LANGUAGES]


def test_few_blocks_are_not_run() -> None:
    assert len([block for block in ALL if block.reason]) <= MOST_NOT_RUN


@of("python")
def test_python_parses_and_uses_public_names_only(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    callbacks = ast.parse((ROOT / "tfps" / "callbacks.py").read_text(encoding="utf-8"))
    known = {*tfps.__all__, *(f"callbacks.{node.name}" for node in callbacks.body if isinstance(node, ast.ClassDef))}
    known |= {"ray", *(f"ray.{name}" for name in tfps.ray.__all__)}
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {found[1] for name in dotted if (found := re.fullmatch(r"tfps\.((?:(?:callbacks|ray)\.)?\w+)", name))}
    assert used <= known
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "tfps"]


@of("sh")
def test_shell_parses(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=60)


@of("sh")
def test_programs_take_the_command_lines_of_blocks(block: Block) -> None:
    for words in command_lines.found_in(block.text):
        assert command_lines.refusal(words) == "", words
        assert command_lines.unknown_options(words) == [], words


@by_page(doc_blocks.PAGES)
def test_programs_have_the_options_that_are_named_in_text(page: Path) -> None:
    programs = "|".join(command_lines.PROGRAMS)
    for text in re.findall(rf"`((?:{programs})\s[^`]*)`", doc_blocks.without_blocks(page)):
        words = shlex.split(text)
        assert command_lines.unknown_options(words) == [], text
        if words[-1].endswith(".py"):  # nothing is left out
            assert command_lines.refusal(words) == "", text


def test_wrong_command_lines_would_be_found() -> None:
    wrong = """
        A=$(hostname):1 tfps_launch --workers two train.py --workers two   # tfps_launch in a comment
        salloc tfps_launch --slurm --workers 2 train.py
        tfps_launch --kubernetes --print \\
          --workers 2 train.py | kubectl apply -f -
        (umask 077; tfps_pserver --port)
        tfps_doctor 10.0.0.4:7070 --time-out 5 &
        """
    found = command_lines.found_in(wrong)
    assert [words[0] for words in found] == [*["tfps_launch"] * 3, "tfps_pserver", "tfps_doctor"]
    said = [command_lines.refusal(words) for words in found]
    expected = ("--workers: invalid", "does not go with", "required: --image", "--port: expected", "--time-out")
    assert [part for part, each in zip(expected, said, strict=True) if part not in each] == []
    assert command_lines.refusal(["tfps_launch", "--worker", "2", "train.py"]) == ""
    assert command_lines.unknown_options(["tfps_launch", "--worker", "2", "train.py", "--mine"]) == ["--worker"]


@of("yaml")
def test_yaml_parses(block: Block) -> None:
    documents = list(yaml.safe_load_all(block.text))
    assert documents
    assert all(isinstance(each, dict) for each in documents)


@pytest.mark.long
@pytest.mark.timeout(600)
@by_page(with_python)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    """All blocks of a page in one process, after tests/doc_pages/preamble.py, which has what they take for granted."""
    made = [block for block in doc_blocks.blocks(page, "python") if not block.reason and not block.file]
    with Shell(tmp_path) as shell:
        if any(f":{PORT}" in block.text for block in made):
            shell.start(["tfps_pserver", "--workers", "1"], list(HOSTS.values()))
        programs = [shell.here((HERE / "preamble.py").read_text(encoding="utf-8"))]
        programs += [shell.here(block.text) for block in made]
        names = ["preamble", *map(str, made)]
        run = "\n".join(
            f"exec(compile({text!r}, {name!r}, 'exec'))" for text, name in zip(programs, names, strict=True)
        )
        (tmp_path / "page.py").write_text(run + "\n")
        shell.run("python page.py")


@pytest.mark.long
@pytest.mark.timeout(900)
@by_page(with_shell)
def test_shell_runs(page: Path, tmp_path: Path) -> None:
    """Line by line, in a folder with a train.py. Pservers stay; the scripts after them are started once per worker."""
    shutil.copy(HERE / "train.py", tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    if page.name == "security.md":
        certificates(tmp_path)
    more: dict[str, str] = {}
    if page.name == "mpi.md":
        if missing := mpi.missing("Open MPI", mpi4py=True):
            pytest.skip(missing)
        more = mpi.variables_for_hosts(tmp_path)
    with Shell(tmp_path, more) as shell:
        for block in doc_blocks.blocks(page):
            if block.file:
                (tmp_path / block.file).write_text(shell.here(block.text))
            elif block.language == "sh" and not block.reason:
                for line in lines_of(block.text):
                    shell.do(line)


def lines_of(text: str) -> list[str]:
    """Commands, those over several lines as one, without lines that are comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def certificates(folder: Path) -> None:
    """Those that docs/security.md names."""
    authority = Authority(folder)
    for name in ("ps0", "w"):
        made = authority.sign(name, f"IP:{HOSTS['10.0.0.4']}")
        Path(made.cert).rename(folder / f"{name}.pem")
        Path(made.key).rename(folder / f"{name}.key")


class Shell(contextlib.ExitStack):
    """Runs commands as the documents have them, on this host: with its own addresses and a free port."""

    def __init__(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._folder, self._more = folder, dict(more or {})
        self._port = jobs.unused_ports(1)
        self._addresses: list[str] = []
        self._workers = 1
        self._pservers = self.enter_context(contextlib.ExitStack())

    def here(self, text: str) -> str:
        """The text with what this host has instead of the documents' hosts and port."""
        for theirs, ours in HOSTS.items():
            text = text.replace(theirs, ours)
        return text.replace(str(PORT), str(self._port))

    def do(self, line: str) -> None:
        """Runs a line; starts it and waits until it is ready, if it is a pserver's."""
        if line.startswith("tfps_pserver") and "--status" not in line:
            named = [ours for theirs, ours in HOSTS.items() if theirs in line]
            self.start(shlex.split(self.here(line), comments=True), named or [HOSTS["10.0.0.4"]])
        elif "python train.py" in line and self._addresses:
            joins = {"TFPS_PSERVERS": ",".join(self._addresses)}
            with ThreadPoolExecutor(self._workers) as pool:
                for ended in [pool.submit(self.run, self.here(line), joins) for _ in range(self._workers)]:
                    ended.result()
        else:
            self.run(self.here(line))

    def start(self, command: list[str], hosts: list[str]) -> None:
        """Starts a pserver on each host, instead of those that run; they end with the test, without an error."""
        self._pservers.close()
        self._workers = int(command[command.index("--workers") + 1])
        self._addresses = [f"{host}:{self._port}" for host in hosts]
        port = [] if "--port" in command else ["--port", str(self._port)]
        token = [] if "--token-file" in command or "--tls-cert" in command else ["--insecure"]
        for host in hosts:
            self._pservers.enter_context(self._pserver([*command, *port, *token, "--host", host]))

    @contextlib.contextmanager
    def _pserver(self, command: list[str]) -> Iterator[None]:
        process = subprocess.Popen(
            command,
            cwd=self._folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(process.stderr or ()), name="pserver-log")
        listener.start()
        try:
            ready = process.stdout.readline() if process.stdout else ""
            assert ready.startswith("tfps_pserver ready"), said
            yield
        finally:
            process.terminate()
            process.wait(60)
            listener.join(60)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        assert process.returncode == 0, said

    def run(self, line: str, more: Mapping[str, str] | None = None) -> None:
        """Runs a line in bash, with `more` environment variables; fails if it does."""
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self._folder,
            env={**self._environment(), **(more or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        assert ended.returncode == 0, f"{line}\n{ended.stdout}"

    def _environment(self) -> dict[str, str]:
        programs = [str(HERE / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        own = {"PATH": os.pathsep.join(programs), "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        own["TFPS_CONNECT_TIMEOUT_S"] = "400"  # on a busy machine processes start minutes apart
        return {**os.environ, **own, **self._more}
