"""A setting in which threads share the calls of the fused kernel, however small, and what they give is compared."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.engine.kernels import aten_flash, fused_threads

__all__ = ["MASK", "N", "Seen", "alone", "assert_same", "inputs", "results", "sharing"]

N, MASK = 960, masks.Window(70, 30)


class Seen:
    """Threads that called torch's operation, with how many threads of torch each.

    Attributes:
        threads: what has been seen.
        before: is run before each call.
        calm: looks until others are seen to be busy.
    """

    def __init__(self) -> None:
        self.threads: dict[int, int] = {}
        self.before: Callable[[], object] = lambda: None
        self.calm = 0

    def is_busy(self, threads: int) -> bool:
        """Answer in place of the system's count."""
        self.calm -= 1
        return self.calm < 0

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, seen."""

        def seen(*args: Any) -> Any:
            self.threads[threading.get_ident()] = torch.get_num_threads()
            self.before()
            return call(*args)

        return seen

    @property
    def others(self) -> set[int]:
        """Threads that are not the one which asks."""
        return set(self.threads) - {threading.get_ident()}


@contextmanager
def sharing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Two threads, which share however little there is, as if others were busy."""
    before, found = torch.get_num_threads(), Seen()
    for name in ("_SMALLEST_CALL", "_SMALLEST_SHARE"):
        monkeypatch.setattr(fused_threads, name, 0)
    monkeypatch.setattr(fused_threads._preemption, "is_frequent", found.is_busy)
    for name in ("forward", "backward"):
        monkeypatch.setattr(aten_flash, name, found.of(getattr(aten_flash, name)))
    torch.set_num_threads(2)
    yield found
    torch.set_num_threads(before)


def inputs(n: int = N, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(2, number, n, 16) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_() for shape in shapes]


def results(its: list[Tensor], mask: masks.Mask = MASK, **options: Any) -> list[Tensor]:
    """Output, lse and gradients."""
    out, lse = sc.attention_with_lse(*its, mask, impl="fused", **options)
    weight = torch.linspace(-1.0, 1.0, out.numel(), dtype=torch.float32).reshape(out.shape)
    loss = (out.float() * weight).sum() + lse.where(lse.isfinite(), 0.0).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, its)]


def alone(*args: Any, **options: Any) -> list[Tensor]:
    """The same on the calling thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return results(*args, **options)
    finally:
        torch.set_num_threads(threads)


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
