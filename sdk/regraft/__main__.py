"""`python -m regraft` is `regraft`."""

import sys

from regraft.cli import main

sys.exit(main())
