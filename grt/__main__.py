"""`python -m grt` is `grt`."""

import sys

from grt.cli import main

sys.exit(main())
