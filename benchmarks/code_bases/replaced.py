"""Judge a replacement: equal outputs and gradients, and no attention left on the model's own code unsaid."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import saccade as sc
from benchmarks.code_bases.case import Case, Run
from benchmarks.code_bases.recorded import tensors
from saccade.support.errors import UnsupportedError

OUTPUTS, GRADIENTS, FLOAT64 = 5e-5, 5e-4, 1e-10
"""The largest differences of outputs and gradients, by the largest number of all outputs or gradients; in float64."""

Verdict = Literal["equal", "refused", "silent", "wrong", "broken"]


@dataclass(frozen=True)
class Replaced:
    """The verdict on a replacement.

    Attributes:
        verdict: "equal" if all attention runs on saccade with equal outputs and gradients; "refused" if
            `replace_attention` or the first run raised and said why; "silent" if the model still computes attention
            itself; "wrong" if outputs or gradients differ; "broken" if the model raises another error.
        why: the reason, if the verdict is not "equal".
    """

    verdict: Verdict
    why: str = ""


def judge_replacement(case: Case) -> Replaced:
    """Replace the attention of a case, and compare outputs, gradients and attention calls with the model's own."""
    original, run = case.model()
    model = copy.deepcopy(original)  # some parameters are made of memory that was never written
    expected = _outputs_and_gradients(original, run)
    before = _own_attention(original, run)
    try:
        sc.replace_attention(model)
        found = _outputs_and_gradients(model, run)
        after = _own_attention(model, run)
    except UnsupportedError as error:
        return Replaced("refused", str(error))
    except Exception as error:  # the model may raise anything; the verdict holds it
        return Replaced("broken", f"{type(error).__name__}: {error}")
    for what, limit, ours, theirs in zip(("outputs", "gradients"), (OUTPUTS, GRADIENTS), found, expected, strict=True):
        difference = _difference(ours, theirs)
        if not difference <= limit and not _is_equal_in_float64(case):
            return Replaced("wrong", f"{what} differ by {difference:.1e}")
    left = after - (before - case.attentions)
    if left > 0:
        return Replaced("silent", f"{left} of {case.attentions} attention calls are still the model's own")
    return Replaced("equal")


def _is_equal_in_float64(case: Case) -> bool:
    """Return whether outputs and gradients are equal in float64, so that a difference in float32 is rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        original, run = case.model()
        model = copy.deepcopy(original.double())
        sc.replace_attention(model)
        pairs = zip(_outputs_and_gradients(model, run), _outputs_and_gradients(original, run), strict=True)
        return all(_difference(ours, theirs) <= FLOAT64 for ours, theirs in pairs)
    except (RuntimeError, TypeError):  # the model's code is written for float32
        return False
    finally:
        torch.set_default_dtype(before)


def _outputs_and_gradients(model: nn.Module, run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs, and the gradients of a random sum of them by all parameters that have one."""
    model.zero_grad()
    out = [x for x in tensors(run(model)) if x.is_floating_point()]
    draw = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=draw)).sum() for x in out if x.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [x.detach() for x in out], [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    largest = max(float(x.abs().max()) for x in theirs if x.numel())
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True) if a.numel()) / largest


def _own_attention(model: nn.Module, run: Run) -> int:
    """Return how many products of softmax weights and attention functions of torch run outside of saccade's kernels."""
    with torch.no_grad(), _Counter() as counter:
        run(model)
    return counter.count


_SOFTMAX = ("_softmax", "_safe_softmax")
_FUNCTIONS = ("scaled_dot_product", "native_multi_head", "transformer_encoder_layer_fwd")
_PRODUCTS = ("bmm", "mm", "baddbmm", "addmm", "addbmm", "mv", "dot")
_KEEPING = ("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "alias",
            "clone", "_to_copy", "native_dropout", "detach", "slice", "select", "split", "contiguous", "mul", "div",
            "add", "native_layer_norm", "masked_fill", "where", "copy_", "cat")  # fmt: skip


class _Counter(TorchDispatchMode):
    """Counts products with the result of a softmax, through views, casts, dropout and changes of each weight.

    A softmax alone does not count: a model that keeps its weights, for a user to read, computes them beside attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._weights: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        tracked = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x in self._weights]
        if not _is_engine(sys._getframe(1)):
            self.count += any(part in name for part in _FUNCTIONS) or (bool(tracked) and name in _PRODUCTS)
            out = func(*args, **(kwargs or {}))
            if name in _SOFTMAX or (tracked and name in _KEEPING):
                for x in tree_leaves(out):
                    if isinstance(x, Tensor):
                        self._weights[x] = True
            return out
        return func(*args, **(kwargs or {}))


def _is_engine(frame: Any) -> bool:
    """Return whether one of saccade's kernels made a call, which torch, a function mode and this file pass on."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        is_passed_on = name.startswith("torch.") or name == __name__ or frame.f_code.co_name == "__torch_function__"
        if not is_passed_on:
            return name.startswith(("saccade.engine.", "saccade.matrix."))
        frame = frame.f_back
    return False
