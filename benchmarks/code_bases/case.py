"""Case: a small model of a code base, with random weights, and the number of attention calls in its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

Run = Callable[[nn.Module], Any]
"""Runs a model on fixed inputs; returns its output: a tensor, or tensors in tuples, lists and dicts."""
Make = Callable[[], tuple[nn.Module, Run]]

_STIRRED = 0.05  # standard deviation of what is added to each parameter, because some are 0 in a new model


@dataclass(frozen=True)
class Case:
    """A small model of a code base.

    Attributes:
        code_base: the package on PyPI, or the name of the code base whose style is rewritten.
        name: the model, as the code base calls it.
        make: makes the model and a function that runs it.
        attentions: the number of attention calls in a forward pass, counted by reading the code.
        leave: patterns of module names whose softmax is no attention, such as a router's.
        entering: patterns of modules whose input is the weights, such as a dropout, where the model changes the results
            of its softmax.
        equation: of the einsum whose first operand is the weights, for the same reason.
        truth: returns the weights of a forward pass, where neither names them.
        order: the order of the axes ``[batch, heads, q_len]`` among those of the model's weights, if they are in
            another; None if batch and heads come first.
        is_rewritten: whether the code is a short rewriting in this folder.
    """

    code_base: str
    name: str
    make: Make
    attentions: int
    leave: tuple[str, ...] = ()
    entering: tuple[str, ...] = ()
    equation: str = ""
    truth: Callable[[nn.Module, Run], list[Tensor]] | None = None
    order: tuple[int, ...] | None = None
    is_rewritten: bool = False

    @property
    def key(self) -> str:
        """The code base and the model."""
        return f"{self.code_base}: {self.name}"

    def model(self) -> tuple[nn.Module, Run]:
        """Make the model with the same random weights each time, in evaluation mode."""
        torch.manual_seed(0)
        with mock.patch("torch.empty", _drawn):
            model, run = self.make()
        with torch.no_grad():
            for x in model.parameters():
                if x.is_floating_point():
                    x.data = x + torch.randn_like(x) * _STIRRED  # not in place: some are expanded

        def seeded(model: nn.Module) -> Any:
            torch.manual_seed(1)
            return run(model)

        return model.eval(), seeded


_empty = torch.empty


def _drawn(*args: Any, **kwargs: Any) -> Tensor:
    """Replace `torch.empty`: some models never write to the memory of their parameters."""
    x = _empty(*args, **kwargs)
    is_drawn = x.is_floating_point() and not x.is_meta and not x.requires_grad
    return x.normal_(std=_STIRRED) if is_drawn else x


CASES: dict[str, Case] = {}
"""All cases by key, in the order in which their files define them."""


def case(code_base: str, name: str, attentions: int, **options: Any) -> Callable[[Make], Make]:
    """Add a function that makes a model to the cases; see `Case`."""

    def add(make: Make) -> Make:
        one = Case(code_base, name, make, attentions, **options)
        assert one.key not in CASES, one.key
        CASES[one.key] = one
        return make

    return add
