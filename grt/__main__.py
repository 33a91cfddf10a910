"""`python -m grt`."""

import sys

from grt.cli import main

sys.exit(main())
