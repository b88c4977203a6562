"""`python -m tfps.launch`: the same as `tfps_launch`."""

import sys

from tfps.launch.cli import main

sys.exit(main())
