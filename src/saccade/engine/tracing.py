"""A product as one operation of a traced program, for ``torch.compile`` and ``torch.export``.

Only numbers and tensors may cross into an operation: the mask goes as a program of integers (`saccade.masks.program`).
Planning and tiles stay behind it, so that a compiler sees one node with static shapes or dynamic ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from saccade.engine.autograd import Backward, Dropped, Kernel, gradients
from saccade.engine.bias import DenseTerm, DistanceTerm, Term
from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels import choose
from saccade.engine.row_order import reordered
from saccade.masks.convert import check_told_apart
from saccade.masks.program import decode, encode
from saccade.scores.base import TileFunction

__all__ = ["execute", "product", "reasons"]

_HEAD = 7  # numbers of a program before those of the mask and the score's function
_NO_TERM, _DENSE, _DISTANCES = range(3)


def execute(scores: ScoreMatrix, value: Tensor, dropout_p: float, impl: str, seed: int | None) -> tuple[Tensor, Tensor]:
    """Output and lse by the kernel that fits, its rows in the order that suits it."""
    check_told_apart(scores.rule, scores.shape, scores.where)
    kernel = choose(scores, dropout_p, impl).kernel
    other = reordered(scores, kernel, dropout_p)
    out, lse = kernel.run(other.scores if other else scores, value, dropout_p=dropout_p, seed=seed)
    return other.restored(out, lse) if other else (out, lse)


def product(
    scores: ScoreMatrix, value: Tensor, dropout_p: float, impl: str, seed: int | None
) -> tuple[Tensor, Tensor] | None:
    """The same as a traced operation; None where something would have to cross that cannot: see `reasons`."""
    encoded = encode((scores.rule, scores.tile_function))
    if encoded is None or impl == "reference":
        return None
    rule_program, rule_tensors = encoded
    bias = scores.bias
    kind = _NO_TERM if bias is None else _DENSE if isinstance(bias, DenseTerm) else _DISTANCES
    lowest, first, addresses = 0, 0, []
    if isinstance(bias, DistanceTerm):
        lowest, first = bias.lowest, bias.first
        addresses = [x for x in (bias.q_addresses, bias.kv_addresses) if x is not None]
    wants_bias = bias is not None and bias.source.requires_grad and torch.is_grad_enabled()
    head = [kind, lowest, first, len(addresses), int(wants_bias), *scores.origin]
    numbers = [scores.scale, math.nan if scores.softcap is None else scores.softcap, float(dropout_p)]
    if dropout_p and seed is None:
        drawn = torch.randint(0, 1 << 31, ())
    else:
        drawn = torch.full((), seed or 0, dtype=torch.int64)
    sources = [*([] if bias is None else [bias.source]), *scores.parameters]
    constants = [*rule_tensors, *addresses, drawn]
    out, lse = _product(scores.query, scores.key, value, sources, constants, [*head, *rule_program], numbers, impl)
    return out, lse


def reasons(scores: ScoreMatrix, impl: str) -> tuple[str, ...]:
    """Why a product cannot be one operation of a traced program; empty if it can."""
    why = []
    if encode(scores.rule) is None:
        instead = "a frozen dataclass of numbers, texts, tensors and masks can be"
        what = "a function, which" if scores.rule.asks_functions else f"a {type(scores.rule).__name__}, which"
        why.append(f"its mask is {what} cannot be written down: {instead}")
    if impl == "reference":
        why.append('impl="reference" is no operation of its own')
    if encode(scores.tile_function) is None:
        instead = "one at the top of a module can be, or a frozen dataclass with __call__"
        why.append(f"its score compares by a function that cannot be written down: {instead}")
    return tuple(why)


def _assembled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
) -> ScoreMatrix:
    """The score matrix again, on the other side."""
    kind, lowest, first, count, _, *origin = program[:_HEAD]
    rule, tile_function = decode(program[_HEAD:], constants[: -1 - count])
    bias: Term | None = None
    if kind == _DENSE:
        bias = DenseTerm(sources[0])
    elif kind == _DISTANCES:
        bias = DistanceTerm(sources[0], lowest, first, *(constants[-1 - count : -1] if count else (None, None)))
    scale, softcap, _ = numbers
    return ScoreMatrix.assembled(
        query,
        key,
        rule,
        (origin[0], origin[1]),
        dtype=value.dtype,
        bias=bias,
        scale=scale,
        softcap=None if math.isnan(softcap) else softcap,
        tile_function=tile_function,
        parameters=tuple(sources if kind == _NO_TERM else sources[1:]),
    )


@dataclasses.dataclass(frozen=True)
class _Derived:
    """A score's function and its gradients by ``torch.func``: autograd is switched off behind an operation."""

    function: TileFunction

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)

    def gradients(self, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.func.vjp(self.function, *tensors)[1](grad)
        return found


def _kernel_name(program: Sequence[int], impl: str) -> str:
    """The kernel asked for; where the bias wants a gradient, one that has it, though no tensor says so here."""
    return "tiled" if impl == "auto" and program[4] else impl


@torch.library.custom_op("saccade::product", mutates_args=())
def _product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
    impl: str,
) -> tuple[Tensor, Tensor]:
    scores = _assembled(query, key, value, sources, constants, program, numbers)
    seed = int(constants[-1]) if numbers[2] else None
    out, lse = execute(scores, value, numbers[2], _kernel_name(program, impl), seed)
    # A compiler counts on this layout: [batch, len, heads, width] in memory.
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@_product.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
    impl: str,
) -> tuple[Tensor, Tensor]:
    del key, sources, constants, program, numbers, impl
    batch, heads, q_len, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = value.new_empty(batch, q_len, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, q_len, dtype=wide)


@torch.library.custom_op("saccade::product_backward", mutates_args=())
def _product_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
    impl: str,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:
    scores = _assembled(query, key, value, sources, constants, program, numbers)
    if scores.tile_function is not None and not hasattr(scores.tile_function, "gradients"):
        scores.tile_function = _Derived(scores.tile_function)
    dropout_p = numbers[2]
    dropped = Dropped(dropout_p, int(constants[-1])) if dropout_p else None
    kernel = cast("Kernel", choose(scores, dropout_p, _kernel_name(program, impl)).kernel)  # not the reference
    parameters = len(scores.parameters)
    wanted = (True, True, True, bool(program[4]), *(True,) * parameters)
    given = Backward(out, lse, grad_out, grad_lse)
    grads = list(gradients(kernel, scores, value, dropped, given, wanted))
    if program[0] == _NO_TERM:
        del grads[3]
    tensors = (query, key, value, *sources)
    return [
        torch.zeros_like(x) if grad is None else grad.to(x.dtype).contiguous().clone()
        for grad, x in zip(grads, tensors, strict=True)
    ]


@_product_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
    impl: str,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> list[Tensor]:
    del constants, program, numbers, impl, out, lse, grad_out, grad_lse
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, *sources)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sources, constants, ctx.program, ctx.numbers, ctx.impl = inputs
    ctx.counts = (len(sources), len(constants))
    ctx.save_for_backward(query, key, value, *sources, *constants, *output)


def _derive(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    query, key, value, *rest = ctx.saved_tensors
    several, many = ctx.counts
    sources, constants, (out, lse) = rest[:several], rest[several : several + many], rest[several + many :]
    settings = (ctx.program, ctx.numbers, ctx.impl)
    of_query, of_key, of_value, *others = _product_backward(
        query, key, value, sources, constants, *settings, out, lse, grad_out, grad_lse
    )
    return of_query, of_key, of_value, others, [None] * many, None, None, None


_product.register_autograd(_derive, setup_context=_keep)
