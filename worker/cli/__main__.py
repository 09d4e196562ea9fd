"""`python -m worker.cli` is `regraft-server`."""

import sys

from worker.cli import main

sys.exit(main())
