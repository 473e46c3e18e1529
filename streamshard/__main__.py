"""``python -m streamshard``: see `cli.py`."""

import sys

from streamshard.cli import main

sys.exit(main())
