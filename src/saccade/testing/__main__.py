"""``python -m saccade.testing`` is ``saccade judge``: it tries the laws of attention on a kernel."""

import importlib
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["judge"]
    importlib.import_module("saccade.cli").main()  # imported by name, since the command line lies above this layer
