"""The masks and inputs that each kernel runs, or the reasons why it does not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from answers.examples import MASKS, TOKENS, WIDTH
from answers.inputs import Input, inputs
from answers.making import mask_named
from saccade.engine.dispatch import KERNELS
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import native
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.masks import Mask


@contextmanager
def anywhere() -> Iterator[list[Kernel]]:
    """Yield kernels that answer as if on their device, with the compiled kernel as if installed."""
    kernels = [type(kernel)() for kernel in KERNELS]
    for kernel in kernels:
        if hasattr(kernel, "devices"):
            kernel.devices = ("cpu",)
    with mock.patch.object(native, "abilities", return_value=native.HALF + 1):
        yield kernels


def ingredients_of(
    length: int, dtype: torch.dtype, mask: Mask | None, *, leaf: bool = False, **more: Any
) -> AttentionInputs:
    """Return inputs for a kernel: two heads of `WIDTH`, with or without gradients."""
    query, key = (torch.zeros(1, 2, length, WIDTH, dtype=dtype) for _ in range(2))
    if leaf:
        query, key = query.requires_grad_(), key.requires_grad_()
    return AttentionInputs.of(query, key, mask, **more).current()


@cache
def kernels_of_masks() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each mask and kernel the reasons why it does not run, empty if it does."""
    found = {}
    with anywhere() as kernels:
        for name in MASKS:
            wide, half = (ingredients_of(TOKENS, dtype, mask_named(name)) for dtype in (torch.float32, torch.bfloat16))
            found[name] = {one.name: min((_reasons(one, given) for given in (wide, half)), key=len) for one in kernels}
    return found


@cache
def kernels_of_inputs() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return for each input and kernel the reasons why it does not run, beside a full mask."""
    found = {}
    with anywhere() as kernels:
        for one in inputs():
            found[one.en] = {kernel.name: _reasons_of_input(kernel, one) for kernel in kernels}
    return found


def _reasons(kernel: Kernel, given: AttentionInputs, **request: Any) -> tuple[str, ...]:
    return kernel.verdict(given, Request(impl=kernel.name, **request)).cannot


def _reasons_of_input(kernel: Kernel, one: Input) -> tuple[str, ...]:
    answers = []
    for dtype in (torch.float32, torch.bfloat16) if one.dtype is None else (one.dtype,):
        given = ingredients_of(64, dtype, None, leaf=True, **one.given)
        if one.forwards:
            asked: list[tuple[str, ...]] = []

            def ask(x: Tensor, given: AttentionInputs = given, asked: list[tuple[str, ...]] = asked) -> Tensor:
                asked.append(_reasons(kernel, given))
                return x

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about the compiler that it loads there
                torch.func.jvp(ask, (torch.zeros(1),), (torch.ones(1),))
            reasons = asked[0]
        else:
            needs_lse = one.needs_lse or given.sink_logit is not None
            reasons = _reasons(kernel, given, dropout_p=one.dropout_p, needs_lse=needs_lse)
        answers.append(reasons)
    return min(answers, key=len)
