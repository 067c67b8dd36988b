"""A fresh process that runs ``import saccade`` loads torch and numpy, and nothing else."""

import subprocess
import sys

import pytest
from tests.sampled import sampled

_CORE = """
import sys
import torch, numpy
import torch.utils.flop_counter  # imports triton where it is installed
before = {name.partition(".")[0] for name in sys.modules}
import saccade
after = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(sorted(after))
"""

_BLOCKED = """
import sys
extras = "matplotlib typer rich safetensors tokenizers transformers hypothesis pytest scipy"
for name in extras.split():
    sys.modules[name] = None
import torch, saccade
x = torch.ones(1, 1, 3, 4)
print(saccade.attention(x, x, x, saccade.masks.Causal()).sum().item())
import saccade.models, saccade.text, saccade.viz, saccade.testing, saccade.theory, saccade.recording, saccade.tasks
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.ci
def test_core_needs_torch_and_numpy_only() -> None:
    assert _run(_CORE) == "['saccade']"


_UNCOMPILED = """
import sys
import saccade.testing.judging, saccade.auditing, saccade.recording, saccade.distributed
import saccade.integrations.transformers
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.ci
def test_no_module_imports_the_compiler() -> None:
    assert _run(_UNCOMPILED) == "False"  # it takes a second


@pytest.mark.ci
def test_everything_but_the_command_line_imports_without_extras() -> None:
    assert _run(_BLOCKED) == "12.0"


_SUBPACKAGES = """
import pkgutil
import saccade
print([one.name for one in pkgutil.iter_modules(saccade.__path__) if one.ispkg and one.name not in dir(saccade)])
print(saccade.recording.UnrecordedLayersWarning.__name__)
"""


@pytest.mark.ci
def test_every_subpackage_is_an_attribute() -> None:
    assert _run(_SUBPACKAGES).splitlines() == ["['cli']", "UnrecordedLayersWarning"]  # the command line needs an extra


@pytest.mark.ci
@pytest.mark.parametrize("package", sampled(["typer", "rich"], 2))
def test_the_command_line_names_the_extra_that_is_missing(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None\nfrom saccade.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "pip install 'saccade-attention[cli]'" in done.stderr
    assert "Traceback" not in done.stderr
