"""What docs/api.md names: the site shows the docstrings of these, by mkdocstrings."""

from __future__ import annotations

import re

import jobs

PAGE = (jobs.ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def public() -> dict[str, list[str]]:
    """Of each module or class that the page names, its members there."""
    found = re.findall(r"^::: (\S+)\n    options:\n      members: \[([^\]]*)\]", PAGE, re.MULTILINE)
    return {name: re.split(r",\s*", members) for name, members in found}
