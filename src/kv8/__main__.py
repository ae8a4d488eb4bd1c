"""``python -m kv8`` is the same program as ``kv8``."""

import sys

from kv8.cli import main

sys.exit(main())
