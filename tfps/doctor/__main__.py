"""`python -m tfps.doctor`: the same as `tfps_doctor`. Tested in tests/doctor/test_cli.py."""

import sys

from tfps.doctor.cli import main

sys.exit(main())
