"""``python -m streamshard``: the command."""

import sys

from streamshard.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
