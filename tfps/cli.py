"""`python -m tfps.cli`: the same as `tfps_pserver`.

Tested in tests/pserver/test_cli.py.
"""

import sys

from tfps.pserver.cli import main

if __name__ == "__main__":
    sys.exit(main())
