"""A product as one operation of a traced program, for ``torch.compile`` and ``torch.export``.

Only numbers and tensors may cross into an operation: the mask goes as a program of integers (`saccade.masks.program`).
Planning and tiles stay behind it, so that a compiler sees one node with static shapes or dynamic ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from saccade.engine import guard
from saccade.engine import product as eager
from saccade.engine.at_positions import AtPositions
from saccade.engine.bias_terms import DenseTerm, Term
from saccade.engine.checks import autocast
from saccade.engine.distance_bias import DistanceTerm
from saccade.engine.dropout import Dropped
from saccade.engine.ingredients import Ingredients
from saccade.engine.kernels.kernel import Backward, Kernel, KernelByHand
from saccade.errors import unsupported
from saccade.masks.convert import check_told_apart
from saccade.masks.program import decode, encode
from saccade.scores.additive import compare

__all__ = ["product", "reasons"]

_OTHER_MASKS = (AtPositions,)
_HEAD = 8  # numbers of a program before those of the mask
_FUNCTIONS = (None, compare)  # of scores, by number: a function itself cannot cross
_NO_TERM, _DENSE, _DISTANCES = range(3)


def product(
    given: Ingredients, value: Tensor, dropout_p: float = 0.0, impl: str | Kernel = "auto", seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """What stands for `saccade.engine.product.product` while a program is traced."""
    device = given.query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        value = autocast(value, given.dtype)
        with torch.autocast(device, enabled=False):
            return product(given, value, dropout_p, impl, seed)
    value = eager.checked(given, value, dropout_p, seed)
    if device == "meta":
        return eager.finished(given, *eager.results_like(given, value))
    why = reasons(given, impl)
    if not why:
        return eager.finished(given, *_one_operation(given, value, dropout_p, impl, seed))
    if not torch.compiler.is_dynamo_compiling():  # but exporting: here an error may be raised
        hint = "masks of saccade.masks and bool tensors go into an exported program, and so do its scores"
        raise unsupported(given.where, "torch.export", why, hint=hint)
    # What cannot cross into an operation is a break in the compiler's graph; where there may be none, it says why. A
    # decorator would do the same, and import the compiler with `import saccade`.
    torch._dynamo.graph_break(msg=f"{given.where} cannot be one operation: {'; '.join(why)}")
    outside: Callable[..., tuple[Tensor, Tensor]] = torch.compiler.disable(_outside)
    return outside(given, value, dropout_p, impl, seed)


def _outside(
    given: Ingredients, value: Tensor, dropout_p: float, impl: str | Kernel, seed: int | None
) -> tuple[Tensor, Tensor]:
    # While sizes are symbols nobody looks at what a mask tells apart.
    check_told_apart(given.rule, given.shape, given.where)
    return eager.product(given, value, dropout_p, impl, seed)


def _one_operation(
    given: Ingredients, value: Tensor, dropout_p: float, impl: str | Kernel, seed: int | None
) -> tuple[Tensor, Tensor]:
    encoded = encode(given.rule, _OTHER_MASKS)
    assert encoded is not None  # who calls has looked
    mask_program, mask_tensors = encoded
    bias = given.bias
    kind = _NO_TERM if bias is None else _DENSE if isinstance(bias, DenseTerm) else _DISTANCES
    lowest, first, addresses = 0, 0, []
    if isinstance(bias, DistanceTerm):
        lowest, first = bias.lowest, bias.first
        addresses = [x for x in (bias.q_addresses, bias.kv_addresses) if x is not None]
    wants_bias = bias is not None and bias.source.requires_grad and torch.is_grad_enabled()
    function = _FUNCTIONS.index(given.tile_function)
    head = [kind, lowest, first, len(addresses), int(wants_bias), function, *given.origin]
    numbers = [given.scale, math.nan if given.softcap is None else given.softcap, float(dropout_p)]
    if dropout_p and seed is None:
        drawn = torch.randint(0, 1 << 31, ())
    else:
        drawn = torch.full((), seed or 0, dtype=torch.int64)
    sources = [*([] if bias is None else [bias.source]), *given.parameters]
    constants = [*mask_tensors, *addresses, drawn]
    out, lse = _product(given.query, given.key, value, sources, constants, [*head, *mask_program], numbers, impl)
    return out, lse


def reasons(given: Ingredients, impl: str | Kernel) -> tuple[str, ...]:
    """Why a product cannot be one operation of a traced program; empty if it can."""
    why = []
    if encode(given.rule, _OTHER_MASKS) is None:
        why.append("its mask is a function, or of a class that saccade does not know")
    if impl == "reference" or not isinstance(impl, str):
        why.append(f'impl="{impl if isinstance(impl, str) else impl.name}" is no operation of its own')
    if given.tile_function not in _FUNCTIONS:
        why.append("its score compares by a function of its own")
    return tuple(why)


def _assembled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sources: Sequence[Tensor],
    constants: Sequence[Tensor],
    program: Sequence[int],
    numbers: Sequence[float],
) -> Ingredients:
    """The score matrix again, on the other side."""
    kind, lowest, first, count, _, function, *origin = program[:_HEAD]
    bias: Term | None = None
    if kind == _DENSE:
        bias = DenseTerm(sources[0])
    elif kind == _DISTANCES:
        bias = DistanceTerm(sources[0], lowest, first, *(constants[-1 - count : -1] if count else (None, None)))
    scale, softcap, _ = numbers
    return Ingredients(
        where="attention",
        shape=(query.shape[0], query.shape[1], query.shape[2], key.shape[2]),
        dtype=value.dtype,
        query=query,
        key=key,
        rule=decode(program[_HEAD:], constants[: -1 - count], _OTHER_MASKS),
        origin=(origin[0], origin[1]),
        scale=scale,
        softcap=None if math.isnan(softcap) else softcap,
        bias=bias,
        tile_function=_FUNCTIONS[function],
        parameters=tuple(sources if kind == _NO_TERM else sources[1:]),
    )


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
    given = _assembled(query, key, value, sources, constants, program, numbers)
    seed = int(constants[-1]) if numbers[2] else None
    out, lse = _outside(given, value, numbers[2], _kernel_name(program, impl), seed)
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
    given = _assembled(query, key, value, sources, constants, program, numbers)
    dropout_p = numbers[2]
    dropped = Dropped(dropout_p, int(constants[-1])) if dropout_p else None
    route = eager.route_of(given, dropout_p, _kernel_name(program, impl))
    wanted = (True, True, True, bool(program[4]), *(True,) * len(given.parameters))
    results = Backward(out, lse, grad_out, grad_lse)
    kernel = cast("KernelByHand", route.kernel)  # `reasons` refuses the reference
    grads = list(guard.backward(kernel, given, value, dropped, results, wanted))
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
