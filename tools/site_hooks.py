"""Hooks of MkDocs (mkdocs.yml): pages are written for the repository's own view, these make them right for the site.

* Files outside of docs/ that readers want become pages: CONTRIBUTING.md, CHANGELOG.md, SECURITY.md, the examples. The
  calculator gets the profiles of tools/.
* Links out of docs/ lead to these pages; to anything else they become plain text, as a site has no such file.
* Tables that are made from the code: the messages of all errors, and what is replaced of Keras. mkdocstrings makes the
  docstrings in api.md.
* Lists nest by two spaces, as everywhere but in Python-Markdown.
* Comments for tools and tests are left out.
"""

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path

import markdown
from markdown.blockprocessors import ListIndentProcessor, OListProcessor, UListProcessor
from markdown.extensions import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))  # for `mkdocs serve`

from tools.message_tables import fill  # noqa: E402
from tools.messages import error_classes, messages  # noqa: E402

EXAMPLES = {f"examples/{path.stem}.md": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))}
PROFILES = ROOT / "tools" / "profiles"  # for the calculator
PROJECT = {
    "project/contributing.md": "CONTRIBUTING.md",
    "project/changelog.md": "CHANGELOG.md",
    "project/security_policy.md": "SECURITY.md",
}
_MADE = {**EXAMPLES, **PROJECT}
_PAGES = {source: page for page, source in _MADE.items()} | {"README.md": "index.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_INDENT = 2
# Of pages in searches: long lists of messages count little otherwise, long tables of figures too much.
_BOOST = {
    "troubleshooting.md": 4,
    "security.md": 4,
    "semantics.md": 2,
    "contract.md": 2,
    "benchmarks.md": 0.3,
    "scaling.md": 0.3,
}
_HIDDEN = {"index.md": ["navigation"], "migrate.md": ["toc"]}  # for more room


class _TwoSpaces(Extension):
    """A nested list is indented by two spaces."""

    def extendMarkdown(self, md: markdown.Markdown) -> None:  # Markdown's name
        before, md.tab_length = md.tab_length, _INDENT  # read by the following when they are made
        md.parser.blockprocessors.register(ListIndentProcessor(md.parser), "indent", 90)
        md.parser.blockprocessors.register(OListProcessor(md.parser), "olist", 40)
        md.parser.blockprocessors.register(UListProcessor(md.parser), "ulist", 30)
        md.tab_length = before


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds what has no name in mkdocs.yml."""
    config.markdown_extensions.append(_TwoSpaces())  # Markdown takes names and extensions
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is not in docs/."""
    for page, source in _MADE.items():
        files.append(File.generated(config, page, content=content_of(source)))
    read = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PROFILES.glob("*.json"))}
    layers = {name: profile["layers"] for name, profile in read.items()}
    files.append(File.generated(config, "size/profiles.js", content=f"const tfpsProfiles = {json.dumps(layers)};\n"))
    return files


def content_of(source: str) -> str:
    """Markdown of a file outside of docs/: itself, or a program with its docstring as the text."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    docstring = ast.get_docstring(ast.parse(text)) or ""
    title, _, rest = docstring.partition("\n")
    commands = "\n".join(line for line in rest.splitlines() if line.startswith(("python ", "tfps_launch ")))
    return f"# {title}\n\n`{source}`\n\n```sh\n{commands}\n```\n\n```python\n{text}```\n"


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leaves comments out, mends links, says what Material wants to know of a page."""
    name = page.file.src_uri
    if name == "troubleshooting.md":
        text = fill(text, messages(), error_classes())
    elif name == "keras_patches.md":
        text = text.replace("<!-- patches -->\n", patches())
    page.meta |= {"search": {"boost": _BOOST.get(name, 1)}, "hide": _HIDDEN.get(name, [])}
    return mended(_COMMENT.sub("", text), name)


def patches() -> str:
    """A row for each attribute of Keras and TensorFlow that tfps replaces."""
    from tfps.strategy.patches import TABLE  # imports TensorFlow

    rows = ["| attribute | what for | replaced in | tests |", "|---|---|---|---|"]
    for patch in TABLE:
        hook = inspect.unwrap(patch.wrap)
        source = Path(inspect.getfile(getattr(hook, "func", hook))).relative_to(ROOT)
        rows.append(f"| `{patch.place}` | {patch.why} | `{source}` | `{patch.test}` |")
    return "\n".join(rows) + "\n"


def mended(text: str, page: str) -> str:
    """The text of a page with links as the site needs them; `page` is its path in docs/."""
    here = posixpath.dirname(_MADE.get(page, f"docs/{page}"))

    def link(found: re.Match[str]) -> str:
        label, target, anchor = found[1], posixpath.normpath(posixpath.join(here, found[2])), found[3] or ""
        if target in _PAGES:
            to = _PAGES[target]
        elif target.startswith("docs/") and (ROOT / target).is_file():
            to = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            return label
        else:
            return found[0]  # MkDocs will say that it leads nowhere
        return f"[{label}]({posixpath.relpath(to, posixpath.dirname(page) or '.')}{anchor})"

    return _LINK.sub(link, text)
