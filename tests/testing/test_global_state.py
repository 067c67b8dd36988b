"""Functions and settings of torch as they were before a call, and how changes of them are told and undone."""

import subprocess
import sys

import torch

from saccade.testing import oracle
from saccade.testing.global_state import Surroundings


def test_nothing_is_told_if_nothing_has_changed():
    assert Surroundings().restore() == ()


def test_functions_and_settings_are_restored(monkeypatch):
    monkeypatch.setattr(torch, "allclose", torch.allclose)  # for the case that restoring fails
    monkeypatch.setattr(oracle, "attention", oracle.attention)
    before, functions, dtype = Surroundings(), (torch.allclose, oracle.attention), torch.get_default_dtype()
    torch.allclose = oracle.attention = lambda *tensors: True
    torch.set_default_dtype(torch.float64)
    told = before.restore()
    assert (torch.allclose, oracle.attention) == functions
    assert torch.get_default_dtype() == dtype
    assert set(told) == {
        "torch.allclose was replaced by another function",
        "saccade.testing.oracle.attention was replaced by another function",
        "torch's default dtype is torch.float64, not torch.float32",
    }


def test_importing_the_compiler_changes_nothing_though_it_wraps_manual_seed():
    lines = (
        "from saccade.testing.global_state import Surroundings",
        "before = Surroundings()",
        "import torch, torch._dynamo",
        "print(before.restore(), torch.manual_seed is torch.random.manual_seed)",
        "print(Surroundings().restore())",
        "torch.manual_seed = print",
        "print(*before.restore())",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["() False", "()", "torch.manual_seed was replaced by another function"]
