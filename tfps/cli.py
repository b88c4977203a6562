"""`python -m tfps.cli`: the same as `tfps_pserver`."""

import sys

from tfps.pserver.cli import main

if __name__ == "__main__":
    sys.exit(main())
