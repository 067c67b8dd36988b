"""Attention as a single custom operator of a traced program, for ``torch.compile`` and ``torch.export``.

The arguments of an operator must be numbers and tensors, so the mask is passed as a program of integers
(`saccade.masks.convert.serialize`). Planning and tiling happen inside the operator. A compiler sees a single node,
with static or dynamic shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine import autograd, dropout, nonfinite, onnx_form, second_order
from saccade.engine import dispatch as eager
from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.bias.term import DenseTerm, Term
from saccade.engine.check_inputs import autocast, check_value
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Backward, Kernel, KernelWithBackward, Request
from saccade.engine.positions.positioned_mask import at_origin
from saccade.masks.convert.as_mask import check_batch_and_heads
from saccade.masks.convert.deferred_masks import AtOrigin
from saccade.masks.convert.recognise_tensor import recognise_tensors
from saccade.masks.convert.serialize import decode, encode
from saccade.scores.base import TileFunction
from saccade.support.errors import unsupported
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_autocast, outside_graph, wants_gradient, without_autocast

CALLED_AS = "attention"  # in errors

_HEAD = 7  # number of integers in a program before the serialised mask and score function
KERNELS = ("auto", *(kernel.name for kernel in eager.KERNELS if kernel.has_backward))
"""Kernels that can run inside the operator, where autograd is off, because they compute their own gradients. "auto" may
choose a different kernel for the forward pass. One of the listed kernels then computes the gradients."""
_NO_TERM, _DENSE, _DISTANCES, _DECAYS = range(4)
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor[] tensors, int num_sources, SymInt[] program, float[] numbers, "
    "str impl"
)


_NOT_TENSORS = (None,) * 4  # gradients of num_sources, program, numbers and impl


def attend_with_lse(inputs: AttentionInputs, value: Tensor, request: Request = eager.DEFAULT) -> tuple[Tensor, Tensor]:
    """Run `saccade.engine.dispatch.attend_with_lse` as a custom operator of a traced program."""
    out, lse = attend(inputs, value, request._replace(needs_lse=True))
    assert lse is not None  # kernels without an lse are skipped
    return out, lse


def attend(inputs: AttentionInputs, value: Tensor, request: Request = eager.DEFAULT) -> tuple[Tensor, Tensor | None]:
    """Run `saccade.engine.dispatch.attend` as a custom operator or, if no operator fits, outside of the graph."""
    if is_autocast(inputs.query):
        value = autocast(value, inputs.dtype)
        with without_autocast(inputs.device):
            return attend(inputs, value, request)
    impl = request.impl
    check_value(value, inputs.query, inputs.key, inputs.dtype)
    dropout.check(request.dropout_p, request.seed)
    value = value.to(inputs.query.dtype)
    if inputs.query.is_meta:
        return eager.postprocessed(inputs, *autograd.empty_results(inputs, value))
    if not torch.compiler.is_dynamo_compiling() and onnx_form.is_exporting():
        out, lse = onnx_form.attend(inputs, value, request)
        return (out, None) if lse is None else eager.postprocessed(inputs, out, lse)
    encoded = encode((inputs.rule, inputs.tile_function))
    is_plain = encoded is not None and inputs.modification is None and impl in KERNELS
    why = () if is_plain else reasons(inputs, impl)
    if encoded is not None and not why:
        call = _OperatorArguments.of(inputs, value, request, *encoded)
        return eager.postprocessed(inputs, *_product(*call))
    if not torch.compiler.is_dynamo_compiling():  # torch.export: an error may be raised
        hint = "a program can contain saccade's masks and scores, bool tensors, and your own frozen dataclasses"
        raise unsupported("torch.export", why, hint=hint)
    outside = outside_graph(_attend_eagerly, f"attention cannot be one operation: {'; '.join(why)}")
    return outside(inputs, value, request)


def _attend_eagerly(inputs: AttentionInputs, value: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    return eager.attend(inputs.after_tracing(), value, request)


def reasons(inputs: AttentionInputs, impl: str | Kernel) -> tuple[str, ...]:
    """Return the reasons why attention cannot run as a custom operator of a traced program; empty if it can."""
    why = []
    if encode(inputs.rule) is None:
        instead = "a frozen dataclass of numbers, strings, tensors and masks can be"
        what = "a function, which" if inputs.rule.calls_functions else f"a {type(inputs.rule).__name__}, which"
        why.append(f"its mask is {what} cannot be serialized: {instead}")
    if impl not in KERNELS:
        why.append(f'impl="{impl if isinstance(impl, str) else impl.name}" cannot be one operation of a graph')
    if encode(inputs.tile_function) is None:
        instead = "a function at the top level of a module can be, or a frozen dataclass with __call__"
        why.append(f"its score uses a function that cannot be serialized: {instead}")
    if inputs.modification is not None:
        why.append("its scores are changed by a function, which cannot be serialized")
    return tuple(why)


class _OperatorArguments(NamedTuple):
    """Arguments of the custom operator: the checked inputs as numbers and tensors.

    AOTInductor cannot pass an empty list or NaN to an operator of another library, so the arguments contain neither.

    Attributes:
        query, key, value: ``[batch, heads, len, width]``.
        tensors: the tensors that may have gradients, then mask and position tensors, then the dropout seed.
        num_sources: the number of tensors that may have gradients.
        program: integers that describe the bias and the positions, then the serialised mask and score function.
        numbers: scale, softcap (0 if there is none) and dropout probability.
        impl: the requested kernel.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    tensors: Sequence[Tensor]
    num_sources: int
    program: Sequence[int]
    numbers: Sequence[float]
    impl: str

    @classmethod
    def of(
        cls,
        inputs: AttentionInputs,
        value: Tensor,
        request: Request,
        program: list[int],
        tensors: list[Tensor],
    ) -> _OperatorArguments:
        """Convert checked inputs and their serialised mask and score function to the custom operator's arguments."""
        bias = inputs.bias
        kind = _NO_TERM if bias is None else _DENSE if isinstance(bias, DenseTerm) else _DISTANCES
        lowest, first, addresses = 0, 0, []
        if isinstance(bias, DistanceTerm):
            lowest, first = bias.lowest, bias.first
            addresses = [x for x in (bias.q_addresses, bias.kv_addresses) if x is not None]
        elif isinstance(bias, DecayTerm):
            kind, addresses = _DECAYS, [bias.last]
        wants_bias = bias is not None and wants_gradient(bias.source)
        head = [kind, lowest, first, len(addresses), int(wants_bias), *inputs.origin]
        numbers = [inputs.scale, inputs.softcap or 0.0, float(request.dropout_p)]
        if request.dropout_p and request.seed is None:
            drawn = torch.randint(0, 1 << 31, ())
        else:
            drawn = torch.full((), request.seed or 0, dtype=torch.int64)
        sources = [*([] if bias is None else [bias.source]), *inputs.parameters]
        constants = [*tensors, *addresses, drawn]
        operands = (inputs.query, inputs.key, value, [*sources, *constants])
        return cls(*operands, len(sources), [*head, *program], numbers, str(request.impl))

    @property
    def sources(self) -> Sequence[Tensor]:
        """The bias and the parameters of the score, which may have gradients."""
        return self.tensors[: self.num_sources]

    @property
    def wants_bias(self) -> bool:
        """Whether the bias needs a gradient. This is an argument, because autograd is off inside the operator."""
        return bool(self.program[4])

    @property
    def kernel_name(self) -> str:
        """Name of the requested kernel; "tiled" instead of "auto" if the bias needs a gradient."""
        return "tiled" if self.impl == "auto" and self.wants_bias else self.impl

    @property
    def dropped(self) -> Dropped | None:
        """Dropout settings rebuilt from the operator's arguments; None without dropout."""
        return Dropped(self.numbers[2], int(self.tensors[-1])) if self.numbers[2] else None

    def inputs(self) -> AttentionInputs:
        """Rebuild the checked inputs from the operator's arguments."""
        kind, lowest, first, count, _, *firsts = self.program[:_HEAD]
        sources, constants, (scale, softcap, _) = self.sources, self.tensors[self.num_sources :], self.numbers
        shape = (*self.query.shape[:3], self.key.shape[2])
        rule, tile_function = decode(self.program[_HEAD:], constants[: -1 - count], shape)
        rule, origin = rule if isinstance(rule, AtOrigin) else at_origin(rule, (firsts[0], firsts[1]), shape)
        bias: Term | None = None
        if kind == _DENSE:
            bias = DenseTerm(sources[0])
        elif kind == _DISTANCES:
            bias = DistanceTerm(sources[0], lowest, first, *(constants[-1 - count : -1] if count else (None, None)))
        elif kind == _DECAYS:
            bias = DecayTerm(sources[0], constants[-2], wide_dtype(self.query.dtype))
        return AttentionInputs(
            shape=shape,
            dtype=self.value.dtype,
            query=self.query,
            key=self.key,
            rule=recognise_tensors(rule, shape, origin, may_cache=False),
            origin=origin,
            scale=scale,
            softcap=softcap if softcap > 0 else None,
            bias=bias,
            tile_function=tile_function,
            parameters=tuple(sources if kind == _NO_TERM else sources[1:]),
        )


class OperatorInputs(NamedTuple):
    """Checked inputs and request of a call to the custom operator in a traced program."""

    inputs: AttentionInputs
    value_dim: int
    request: Request


def operator_inputs(arguments: Sequence[Any]) -> OperatorInputs:
    """Rebuild the inputs and the request from the arguments of the custom operator or of its backward operator."""
    call = _OperatorArguments(*arguments[: len(_OperatorArguments._fields)])
    return OperatorInputs(call.inputs(), call.value.shape[3], Request(call.numbers[2], call.kernel_name))


@dataclasses.dataclass(frozen=True)
class _WithGradients:
    """A score function with gradients from ``torch.func``, because autograd is off inside a custom operator."""

    function: TileFunction

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)

    def gradients(self, grad: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = torch.func.vjp(self.function, *tensors)[1](grad)
        return gradients


def _without_zeros(call: _OperatorArguments) -> AttentionInputs:
    """Rebuild the inputs, but drop a bias that is all zeros, which a float mask in a traced program may produce."""
    inputs = call.inputs()
    is_zero = isinstance(inputs.bias, DenseTerm) and not call.wants_bias and not bool(inputs.bias.source.any())
    return inputs.replaced(bias=None) if is_zero else inputs


@torch.library.custom_op("saccade::product", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _product(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = _OperatorArguments(*arguments)
    seed = None if call.dropped is None else call.dropped.seed
    inputs = _without_zeros(call)
    # During tracing, sizes were symbolic and the mask's numbers of batch items and heads could not be checked.
    check_batch_and_heads(inputs.rule, inputs.shape)
    out, lse = eager.attend(inputs, call.value, Request(call.numbers[2], call.kernel_name, seed, True))
    assert lse is not None
    # Compilers rely on this memory layout: [batch, len, heads, width].
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@_product.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = arguments
    batch, heads, q_len, _ = query.shape
    wide = wide_dtype(query.dtype)
    out = value.new_empty(batch, q_len, heads, value.shape[3]).transpose(1, 2)
    return out, query.new_empty(batch, heads, q_len, dtype=wide)


@torch.library.custom_op(
    "saccade::product_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor out, Tensor lse, Tensor grad_out, Tensor grad_lse) -> Tensor[]",
)
def _product_backward(*arguments: Any) -> list[Tensor]:
    call, results = _OperatorArguments(*arguments[:8]), Backward(*arguments[8:])
    inputs = _without_zeros(call)
    if inputs.tile_function is not None and not hasattr(inputs.tile_function, "gradients"):
        inputs = inputs.replaced(tile_function=_WithGradients(inputs.tile_function))
    dropped = call.dropped
    chosen = eager.choose_kernel(inputs, Request(call.numbers[2], call.kernel_name, needs_backward=True))
    wanted = (True, True, True, call.wants_bias, *(True,) * len(inputs.parameters))
    kernel = cast("KernelWithBackward", chosen)  # `reasons` excludes the reference
    grads = list(nonfinite.backward(kernel, inputs, call.value, dropped, results, wanted))
    if call.program[0] == _NO_TERM:
        del grads[3]
    tensors = (call.query, call.key, call.value, *call.sources)
    return [
        torch.zeros_like(x) if grad is None else grad.to(x.dtype).contiguous().clone()
        for grad, x in zip(grads, tensors, strict=True)
    ]


@_product_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    query, key, value, tensors, num_sources, *_ = arguments
    sources = tensors[:num_sources]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value, *sources)]


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, *tensors, *output)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    query, key, value, *tensors, out, lse = ctx.saved_tensors
    of_query, of_key, of_value, *others = _product_backward(
        query, key, value, tensors, *ctx.settings, out, lse, grad_out, grad_lse
    )
    return of_query, of_key, of_value, _of_tensors(others, tensors), *_NOT_TENSORS


def _of_tensors(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return one gradient per tensor: None is appended for the last tensors, which have no gradients."""
    return [*grads, *(None,) * (len(tensors) - len(grads))]


_product.register_autograd(_backward, setup_context=_save_arguments)


def _save_backward_arguments(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _save_arguments(ctx, inputs[:8], (inputs[9], *inputs[10:]))


def _second_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, *constants, lse, grad_out, grad_lse = ctx.saved_tensors
    call = _OperatorArguments(query, key, value, constants, *ctx.settings)
    inputs = call.inputs()
    of = second_order.Backward(inputs, value, call.dropped, lse, grad_out, grad_lse)
    again = torch.is_grad_enabled()
    nothing = [] if inputs.bias is not None else [None]  # the operator has no argument for a missing bias
    grads = [*grads[:3], *nothing, *grads[3:]]
    tensors = (*inputs.sources(value), grad_out, grad_lse)
    needed = [x is not None and x.requires_grad for x in tensors]
    derivatives = list(second_order.derivatives(of, tuple(grads), needed, create_graph=again))
    of_query, of_key, of_value, of_bias, *others, of_out, of_lse = derivatives
    others = [of_bias, *others] if inputs.bias is not None else others
    return of_query, of_key, of_value, _of_tensors(others, constants), *_NOT_TENSORS, None, None, of_out, of_lse


_product_backward.register_autograd(_second_backward, setup_context=_save_backward_arguments)
