#!/usr/bin/env -S bash -c '"${0%/*}/python" "$0" "$@"'
"""Writes docs/keras_patches.md: every attribute of Keras and TensorFlow that tfps replaces, from its table.

`--check` writes nothing and fails unless the page is up to date.
"""

from __future__ import annotations

import argparse
import inspect
import pathlib
import sys
from collections.abc import Iterable, Sequence

from tfps.graph.patches import Patch
from tfps.strategy.patches import TABLE

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "keras_patches.md"
PROGRAM = "tools/make_patches_page.py"
_HEAD = f"""# What is replaced of Keras and TensorFlow

Written by `{PROGRAM}` from the table in `tfps/strategy/patches.py`.

Keras and TensorFlow have no hook for most of what must be the same on all workers. So the first `tfps.Strategy` of a
process replaces these attributes, once. For models, optimizers and datasets of other strategies, and for those without
any, each calls the original with the same arguments and does nothing else.

Each attribute is replaced once, so the order of rows does not matter. Where several things have to happen at one
place, its row says in which order. Beside functions there is one setting: AutoGraph leaves functions of tfps alone.

Private names are checked when tfps is imported: a version of Keras or TensorFlow without one of them is refused with
the name.

| attribute | what for | replaced in | tests |
|---|---|---|---|
"""


def made(table: Iterable[Patch]) -> str:
    """The page."""
    return _HEAD + "".join(
        f"| `{patch.place}` | {patch.why} | `{_module(patch)}` | `{patch.test}` |\n" for patch in table
    )


def _module(patch: Patch) -> str:
    hook = inspect.unwrap(patch.wrap)
    source = inspect.getsourcefile(getattr(hook, "func", hook))
    return "" if source is None else str(pathlib.Path(source).relative_to(ROOT))


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless the page is up to date")
    parser.add_argument("--page", type=pathlib.Path, default=PAGE, metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    before = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    after = made(TABLE)
    if before != after and options.check:
        sys.exit(f"{PROGRAM}: {options.page} must be up to date; run {PROGRAM} and commit the result")
    if before != after:
        options.page.write_text(after, encoding="utf-8")
    print(f"{PROGRAM}: {'up to date' if before == after else f'wrote {options.page}'}")


if __name__ == "__main__":
    main()
