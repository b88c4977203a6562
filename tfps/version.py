"""The package's version, defined only here (setup.py reads it without importing tfps).

Tested in tests/test_versions.py.
"""

__version__ = "0.2.0.dev0"
