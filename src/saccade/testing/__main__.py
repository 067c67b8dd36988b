"""``python -m saccade.testing`` runs ``saccade judge``, which tests a kernel against the laws of attention."""

import importlib
import sys

if __name__ == "__main__":
    sys.argv[1:1] = ["judge"]
    importlib.import_module("saccade.cli").main()  # imported by name, since the command line is in a higher layer
