"""The site has every message that tfps raises, below advice. tools/messages.py reads the sources."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import tfps
from tools import message_tables as page
from tools.messages import HOLE, ROOT, Message, error_classes, messages

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
LEAST_ADVICE = 20  # words
KINDS = [name for name in tfps.__all__ if name.endswith("Error")]


@pytest.fixture(scope="module")
def filled() -> str:
    return page.fill(TEXT, messages(), error_classes())


def test_every_message_has_one_place_on_the_page(filled: str) -> None:
    rows = re.findall(r"^\| `.* \|$", filled.partition("\n## ConfigError\n")[2], re.MULTILINE)
    assert len([row for row in rows if row.count(" | ") == 0]) == len(messages())


@pytest.mark.parametrize("kind", KINDS)
def test_every_class_has_advice_written_for_it(kind: str) -> None:
    section = TEXT.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
    advice = re.sub(r"<!--.*?-->|^#.*?$", "", section, flags=re.DOTALL | re.MULTILINE)
    assert len(advice.split()) >= LEAST_ADVICE


def test_every_group_of_messages_has_advice_written_for_it() -> None:
    for group in re.split(r"^##+ ", TEXT, flags=re.MULTILINE)[1:]:
        advice = group.partition("<!-- messages")[0].partition("\n")[2]
        assert len(advice.split()) >= 3, group.partition("\n")[0]


def test_all_public_errors_raise_something() -> None:
    assert {message.kind for message in messages()} == {name for name in tfps.__all__ if name.endswith("Error")}


def test_real_messages_are_among_those_found(tmp_path: Path) -> None:
    errors = []
    for settings in ({"slice_bytes": 0}, {"policy": "best"}, {"staging_depth": 1}, {"tls_ca": 1}):
        with pytest.raises(tfps.ConfigError) as caught:
            tfps.Config(**settings)
        errors.append(str(caught.value))
    for error in errors:
        assert any(matches(message, error) for message in messages() if message.kind == "ConfigError"), error


def test_what_programs_meet_stands_by_the_settings_and_by_the_saves_that_it_is_about(filled: str) -> None:
    settings, saves = (
        filled.partition(f"\n### {head}\n")[2].partition("\n### ")[0]
        for head in ("Fields of Config", "Saved rows of tables")
    )
    for text in ("mode must be one of", "min_workers must be", "update must be one of", "quorum must be"):
        assert f"| `{text}" in settings
    assert "is damaged" in saves


def matches(message: Message, error: str) -> bool:
    return re.fullmatch(".+".join(map(re.escape, message.text.split(HOLE))), error) is not None


def package(folder: Path, source: str) -> list[str]:
    """The texts of a package with this module."""
    (folder / "tfps").mkdir()
    (folder / "tfps" / "errors.py").write_text("class TfpsError(Exception): ...\nclass ConfigError(TfpsError): ...\n")
    (folder / "tfps" / "module.py").write_text(textwrap.dedent(source))
    return [message.text for message in messages(folder / "tfps")]


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("raise ConfigError('plain text')", ["plain text"]),
        ("raise errors.ConfigError(f'{name} must be {rule!r}')", [f"{HOLE} must be {HOLE}"]),
        ("raise ConfigError('one part, ' f'{a} another')", [f"one part, {HOLE} another"]),
        ("raise ConfigError('is it this' if there else 'or is it that')", ["is it this", "or is it that"]),
        ("return ConfigError('not raised here')", ["not raised here"]),
        ("raise ConfigError(text)", []),
        ("raise ValueError('of another class')", []),
        ("for name in ('one', 'two'):\n    raise ConfigError(f'{name} is wrong')", ["one is wrong", "two is wrong"]),
        (
            "def why():\n    return 'none given' if a else f'{b} is long'\nraise ConfigError(f'bad name: {why()}')",
            ["bad name: none given", f"bad name: {HOLE} is long"],
        ),
        (
            "for name, rule in TABLE:\n    raise ConfigError(f'{name} must be {rule}')",
            ["one must be whole", "two must be a text"],
        ),
        ("def check():\n    what = 'a long name'\n    raise ConfigError(f'got {what}')", ["got a long name"]),
    ],
)
def test_messages_are_read_however_they_are_made(source: str, texts: list[str], tmp_path: Path) -> None:
    indented = textwrap.indent(source, "    ")
    table = "TABLE: tuple = (('one', 'whole'), ('two', 'a text'))\n"
    assert package(tmp_path, f"{table}def f():\n{indented}") == texts


PLACES = """
## ConfigError

<!-- messages: ConfigError: tfps/tables/ -->

<!-- messages: ConfigError: no such | not there -->

<!-- messages: ConfigError -->
"""


def message(text: str, module: str = "tfps/module.py") -> Message:
    return Message("ConfigError", text, module, 1)


OF_TABLES = message("of a table", "tfps/tables/files.py")


def test_a_message_goes_to_the_place_that_names_a_part_of_it_or_its_module_else_to_the_rest_of_its_class() -> None:
    here = message("a table is not there", "tfps/tables/files.py")
    known = [message("it is not there"), message("something | new"), OF_TABLES, here]
    filled = page.fill(PLACES, known, ["ConfigError"])
    tables = [re.findall(r"^\| `(.*)` \|$", part, re.MULTILINE) for part in filled.split("| message |")[1:]]
    assert tables == [["of a table"], ["a table is not there", "it is not there"], ["something \\| new"]]
    assert "<!--" not in filled


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (PLACES.replace("## ConfigError", "## Config"), "heading '## ConfigError'"),
        (PLACES.replace("<!-- messages: ConfigError -->", ""), "a place for the rest of ConfigError"),
        (PLACES.replace("no such | not there", "gone"), "must have one of gone, none has"),
        (PLACES.replace("tfps/tables/", "tfps/gone.py"), "must name modules that there are, got tfps/gone.py"),
        (PLACES.replace("ConfigError: no such", "OtherError: no such"), "must name a class of tfps/errors.py"),
    ],
)
def test_a_page_that_lacks_something_is_refused(text: str, error: str) -> None:
    with pytest.raises(page.PageError, match=re.escape(error)):
        page.fill(text, [message("it is not there"), OF_TABLES], ["ConfigError"])
