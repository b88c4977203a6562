"""`python -m tfps.trace_cli`: the same as `tfps_trace`.

Tested in tests/trace/test_cli.py.
"""

import sys

from tfps.trace.cli import main

if __name__ == "__main__":
    sys.exit(main())
