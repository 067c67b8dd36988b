"""Optional packages are imported when they are used, not when we are imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import saccade.models, saccade.text, saccade.viz
optional = {"matplotlib", "tokenizers", "safetensors", "transformers", "typer", "rich"}
print(sorted(optional & {name.split(".")[0] for name in sys.modules}))
"""


@pytest.mark.ci
def test_importing_us_imports_nothing_optional():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
