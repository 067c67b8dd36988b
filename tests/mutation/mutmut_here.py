"""mutmut as it is used here: ``python mutmut_here.py run`` in a scratch copy; see `run.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mutmut.__main__ as mutmut  # noqa: E402

import collected  # noqa: E402
import properties  # noqa: E402
import words  # noqa: E402

if __name__ == "__main__":
    words.install()
    if os.environ.get("MUTATION_PROPERTIES"):
        properties.install()
    collected.install(float(os.environ.get("MUTATION_SECONDS", "10")))
    mutmut.cli()
