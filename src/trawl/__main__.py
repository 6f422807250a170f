"""Entry point of ``python -m trawl``."""

import sys

from trawl.extras.cli import main

if __name__ == "__main__":
    sys.exit(main())
