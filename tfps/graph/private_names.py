"""Checks the private names of other packages that tfps uses at import, so that nothing fails later.

tf_private.py and keras_private.py list these names, and why they are needed.

Tested in tests/test_private_names.py, which also holds that tfps uses no others.
"""

from __future__ import annotations

import dis
import inspect
from types import ModuleType

needed: dict[type | ModuleType, set[str]] = {}  # owner (module or class) -> names that have been checked


def needs(owner: type | ModuleType, *names: str) -> None:
    """Checks that `owner` has `names`, and remembers them in `needed`.

    Args:
        owner: a module, or a class.
        names: for a class, also attributes that its methods assign: instances have them.

    Raises:
        ImportError: it lacks one.
    """
    for name in names:
        if not (hasattr(owner, name) or (inspect.isclass(owner) and _assigns(owner, name))):
            raise ImportError(f"{owner} has no {name}")
    needed.setdefault(owner, set()).update(names)


def _assigns(owner: type, name: str) -> bool:
    """Whether a method of `owner` or of its bases assigns the attribute `name`."""
    methods = (member for each in owner.__mro__ for member in vars(each).values() if inspect.isfunction(member))
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for method in map(inspect.unwrap, methods)
        if inspect.isfunction(method) and name in method.__code__.co_names  # the rest takes longer
        for instruction in dis.get_instructions(method)
    )
