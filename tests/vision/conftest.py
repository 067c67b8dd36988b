"""Modules with every parameter and running statistic drawn, so that no term hides behind a 0 or a 1."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _drawn(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, own in module.state_dict().items():
            if own.is_floating_point():
                own.copy_(torch.randn(own.shape, generator=generator, dtype=own.dtype) * 0.5)
                if name.endswith("running_var"):
                    own.abs_().add_(0.5)
    return module.eval()


@pytest.fixture
def drawn():
    return _drawn


class _Sizes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = [0]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.seen.append(x.untyped_storage().nbytes() // x.element_size())
        return out


@contextlib.contextmanager
def _largest_allocation():
    """Entries of every storage that torch makes inside, forward and backward."""
    with _Sizes() as mode:
        yield mode.seen


@pytest.fixture
def largest_allocation():
    return _largest_allocation
