"""Passes: a forward run, a training step, one token more; run dry."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from saccade.costs.cases import Subject, held_tensors
from saccade.costs.dry_run import DryRun, dry
from saccade.costs.operation import Step

__all__ = ["Pass", "Share", "decoding", "forward", "training"]


class Share(NamedTuple):
    """What all operations of one name cost together.

    Attributes:
        calls: how many there are.
        flops: floating-point operations of matrix products.
        bytes_moved: what they read and write.
    """

    calls: int
    flops: int
    bytes_moved: int


class Pass(NamedTuple):
    """One run: what it computes, moves and holds.

    Attributes:
        steps: its operations, in their order.
        peak_bytes: most memory that tensors hold at any time: weights, inputs, results, and in training also gradients,
            what is kept for the way back and the optimizer's tensors.
    """

    steps: tuple[Step, ...]
    peak_bytes: int

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, two for each multiplication and addition."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes_moved(self) -> int:
        """Bytes that the operations read and write, each tensor once for each operation."""
        return sum(step.moved for step in self.steps)

    def shares(self) -> dict[str, Share]:
        """The same by operation, the one with most floating-point operations first."""
        found: dict[str, Share] = defaultdict(lambda: Share(0, 0, 0))
        for step in self.steps:
            calls, flops, moved = found[step.name]
            found[step.name] = Share(calls + 1, flops + step.flops, moved + step.moved)
        return dict(sorted(found.items(), key=lambda item: (-item[1].flops, -item[1].bytes_moved)))

    def __repr__(self) -> str:
        return f"Pass({self.flops:,} FLOPs, {self.bytes_moved:,} bytes moved, {self.peak_bytes:,} bytes at most)"


def forward(subject: Subject, mode: FakeTensorMode, length: int) -> Pass:
    """A run without gradients, in evaluation."""
    subject.module.eval()
    with mode:
        given = subject.given(length)
    with dry(DryRun(_bytes(subject.module, given)), mode) as run, torch.no_grad():
        subject.called(*given)
    return Pass(tuple(run.steps), run.most)


def training(subject: Subject, mode: FakeTensorMode, length: int, optimizer_tensors: int) -> Pass:
    """A step of training: forward, loss and gradients, and the optimizer's tensors, though not its work.

    The loss is the cross entropy of the next token for a model of tokens, and a mean for everything else.
    """
    subject.module.train()
    with mode:
        given = subject.given(length)
    states = optimizer_tensors * sum(x.nbytes for x in subject.module.parameters() if x.requires_grad)
    with dry(DryRun(_bytes(subject.module, given) + states), mode) as run, torch.enable_grad():
        loss = _loss(subject.called(*given), subject.module)
        loss.backward()
    return Pass(tuple(run.steps), run.most)


def decoding(subject: Subject, mode: FakeTensorMode, length: int, cache_bytes: int) -> Pass:
    """One more token after ``length - 1``, whose keys and values a cache holds."""
    subject.module.eval()
    with dry(DryRun(), mode), torch.no_grad():
        given = subject.given(1)
        options = subject.filled(length - 1)
    run = DryRun(_bytes(subject.module, given) + cache_bytes, past=0 if options else length - 1)
    with dry(run, mode), torch.no_grad():
        subject.called(*given, **options)
    return Pass(tuple(run.steps), run.most)


def _bytes(module: nn.Module, given: tuple[Tensor, ...]) -> int:
    """Return the bytes that a module and its inputs hold, each memory once."""
    tensors = (*held_tensors(module), *given)
    return sum({id(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}.values())


def _loss(made: Any, module: nn.Module) -> Tensor:
    logits = getattr(made, "logits", None)
    found = logits if logits is not None else next(x for x in tree_leaves(made) if isinstance(x, Tensor))
    vocab = getattr(getattr(module, "config", None), "vocab_size", None)
    if found.shape[-1] == vocab:
        aims = torch.zeros(found.shape[:-1], dtype=torch.long)
        return nn.functional.cross_entropy(found.flatten(0, -2).float(), aims.flatten())
    return found.float().mean()
