"""`python -m tfps.launch`: the same as `tfps_launch`. Tested in tests/launch/test_cli.py."""

import sys

from tfps.launch.cli import main

sys.exit(main())
