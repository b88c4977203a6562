"""Command lines of tfps' programs in a text, as the programs' own parsers take them; nothing is run."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Callable, Sequence

import tfps.doctor.cli
import tfps.pserver.cli
import tfps.trace.cli
from tfps.launch import cli, kubernetes

_MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "tfps_pserver": tfps.pserver.cli.main,
    "tfps_trace": tfps.trace.cli.main,
    "tfps_doctor": tfps.doctor.cli.main,
}
PROGRAMS = ("tfps_launch", *_MAINS)
_END = "--end-of-test"  # an option that no program has: with it, a program that takes all others ends there


def found_in(shell: str) -> list[list[str]]:
    """The words of each call of a program, without variables before it and what it is piped to."""
    found: list[list[str]] = []
    for line in shell.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        inside = False
        for word in words:
            inside = not set(word) <= set("();<>|&") and (inside or word in PROGRAMS)
            if inside and word in PROGRAMS:
                found.append([])
            if inside:
                found[-1].append(word)
    return found


def refusal(words: Sequence[str]) -> str:
    """What the program says of its command line; "" if it takes it."""
    program, *arguments = words
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            if program != "tfps_launch":
                _MAINS[program]([*arguments, _END])
            elif arguments[:1] == ["--kubernetes"]:
                kubernetes.parse(arguments[1:])
            else:
                cli.parse(arguments)
        except SystemExit as ended:
            error = said.getvalue().rpartition(" error: ")[2].strip()
            return error if ended.code and error != f"unrecognized arguments: {_END}" else ""
    return ""


def unknown_options(words: Sequence[str]) -> list[str]:
    """Long options before the script that the program's --help does not list, abbreviated ones among them."""
    program, *arguments = words
    scripts = [index for index, word in enumerate(arguments) if word.endswith(".py")]
    own = arguments[: scripts[0]] if scripts else arguments
    known = _listed(program, "--kubernetes" in own)
    return [word for word in own if word.startswith("--") and word.partition("=")[0] not in known]


@functools.cache
def _listed(program: str, with_manifests: bool) -> set[str]:
    """The options of a program, and those that tfps_launch has for manifests."""
    said = io.StringIO()
    mains = [_MAINS.get(program, cli.parse), *([kubernetes.parse] if with_manifests else [])]
    for main in mains:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            main(["--help"])
    return set(re.findall(r"--[\w-]+", said.getvalue()))
