"""``python -m onecopy``: the same as the command ``onecopy``."""

import sys

from onecopy.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
