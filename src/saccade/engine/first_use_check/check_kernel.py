"""The first-use check of a kernel, which compares a few rows of its results with rows computed from the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine import autograd
from saccade.engine.first_use_check.results import Compared, FirstUse
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel, Request
from saccade.engine.tiles.grouped_heads import product
from saccade.engine.tiles.tile_scores import allowed, normalised, visible_scores
from saccade.plan import ColumnRange, Tile
from saccade.support.numerics import widest_dtype

_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Limits for the largest error relative to the possible rounding error, by dtype: a few dozen roundings."""
_REDUCED = 1e-2  # the limit for float32 if torch's settings allow products in lower precision (TF32)
_FLOOR = 0.1  # added to the size of each row, in units of the typical size, so that errors in tiny rows count less


def check_kernel(kernel: Kernel, inputs: AttentionInputs, value: Tensor, *, gradients: bool) -> FirstUse:
    """Run a kernel and compare a few of its rows with rows computed from the definition.

    The compared rows are the first, the last, rows on both sides of block and tile edges, and a few random rows. The
    compared heads are the first two and the first head of the next group in the first batch item, the last head of the
    last item, and a random one. Errors are relative to the possible rounding error: the root of the sum of the squared
    products that are added.

    Args:
        kernel: the kernel to check.
        inputs, value: the checked inputs and the value; finite and not empty.
        gradients: whether to compare gradients as well, with respect to query, key, value and other tensors that
            require gradients.

    Cost: one run of the kernel (with ``gradients``, also its backward pass), and computing a few rows of 5 heads from
        the definition.
    """
    limit = _LIMITS[inputs.dtype]
    if inputs.dtype == torch.float32 and not inputs.query.is_cpu and torch.get_float32_matmul_precision() != "highest":
        limit = _REDUCED
    picks = list(picked_rows(inputs))
    raised: str | None = None
    quantities: tuple[Compared, ...] = ()
    try:
        quantities = _largest_errors(kernel, inputs, value, picks, gradients)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise errors of any class: report it, and run a different kernel
        raised = _error_text(error)
    return _first_use(kernel, inputs, value, sum(len(pick.rows) for pick in picks), limit, quantities, raised)


def after_error(kernel: Kernel, inputs: AttentionInputs, value: Tensor, error: Exception) -> FirstUse:
    """Return the result of the first-use check for a kernel that raised an error."""
    return _first_use(kernel, inputs, value, 0, 0.0, (), _error_text(error))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _first_use(
    kernel: Kernel,
    inputs: AttentionInputs,
    value: Tensor,
    rows: int,
    limit: float,
    quantities: tuple[Compared, ...],
    raised: str | None,
) -> FirstUse:
    return FirstUse(
        kernel=kernel.name,
        place=_name_of(inputs.device),
        rows=rows,
        limit=limit,
        quantities=quantities,
        raised=raised,
        shapes=(tuple(inputs.query.shape), tuple(inputs.key.shape), tuple(value.shape)),
        mask=str(inputs.rule),
        dtype=inputs.dtype,
        device=inputs.device,
    )


class _KernelResults(NamedTuple):
    """Results of the kernel being checked, and the upstream gradients for its backward pass.

    Attributes:
        out, lse: the kernel's results; the lse is None if the kernel returns none.
        of_rows, of_lse: upstream gradients of output and lse at the compared rows, one for each `Pick`.
    """

    out: Tensor
    lse: Tensor | None
    of_rows: list[Tensor]
    of_lse: list[Tensor]

    @classmethod
    def of(cls, kernel: Kernel, inputs: AttentionInputs, value: Tensor, picks: list[Pick]) -> _KernelResults:
        if kernel.has_backward and autograd.is_recorded(inputs, value):
            out, lse = autograd.differentiable(kernel, inputs, value, None)
        else:
            out, lse = kernel.forward(inputs, value, None)  # type: ignore[assignment]
        gives_lse = not kernel.verdict(inputs, Request(impl=kernel.name, needs_lse=True)).cannot
        generator = torch.Generator().manual_seed(1)
        of_rows = [torch.randn(len(pick.rows), out.shape[3], generator=generator).to(out) for pick in picks]
        of_lse = [torch.randn(len(pick.rows), generator=generator).to(out) * gives_lse for pick in picks]
        return cls(out, lse if gives_lse else None, of_rows, of_lse)

    def gradients(self, picks: list[Pick], leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the kernel's gradients with respect to all leaves. Upstream gradients are 0 in rows not compared."""
        both = [(self.out, self.of_rows), (self.lse, self.of_lse)]
        parts = [(results, of_picks) for results, of_picks in both if results is not None and results.requires_grad]
        if not parts:
            return (None,) * len(leaves)
        grads = []
        for results, of_picks in parts:
            grad = torch.zeros_like(results)
            for pick, part in zip(picks, of_picks, strict=True):
                grad[pick.item, pick.head, pick.rows] = part.to(grad.dtype)
            grads.append(grad)
        return torch.autograd.grad([results for results, _ in parts], leaves, grads, allow_unused=True)


def _largest_errors(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, picks: list[Pick], gradients: bool
) -> tuple[Compared, ...]:
    """Run the kernel and return the largest errors of its output, lse and gradients in the compared rows."""
    sources = inputs.sources(value)
    known = len(sources) - len(inputs.captured)  # a score function reads its captured tensors itself
    wanted = [gradients and x is not None and x.requires_grad for x in sources[:known]]
    leaves = [None if x is None else x.detach().requires_grad_(want) for x, want in zip(sources, wanted, strict=False)]
    detached, values = inputs.of_sources((*leaves, *inputs.captured))
    # Saved-tensor hooks of the caller, such as those of checkpointing, must not see this pass.
    with torch.set_grad_enabled(gradients), torch.autograd.graph.saved_tensors_hooks(_identity, _identity):
        results = _KernelResults.of(kernel, detached, values, picks)
        references = [
            reference_rows(detached, values, pick, of_rows, of_lse, gradients=any(wanted))
            for pick, of_rows, of_lse in zip(picks, results.of_rows, results.of_lse, strict=True)
        ]
        compared = list(_errors_of_results(results, picks, references))
        if any(wanted):
            differentiable = [x for x in leaves if x is not None and x.requires_grad]
            grads = iter(results.gradients(picks, differentiable))
            compared += _errors_of_gradients(
                [next(grads) if want else None for want in wanted], picks, references, wanted
            )
    names = dict.fromkeys(quantity.name for quantity in compared)
    return tuple(
        max((quantity for quantity in compared if quantity.name == name), key=lambda quantity: quantity.error)
        for name in names
    )


def _identity(x: Tensor) -> Tensor:
    return x


def _errors_of_results(
    results: _KernelResults, picks: list[Pick], references: list[ReferenceRows]
) -> Iterator[Compared]:
    """Yield the largest errors of a checked kernel's output and lse for each `Pick`."""
    for pick, reference in zip(picks, references, strict=True):
        where = (pick.item, pick.head, pick.rows)
        yield _worst_row("output", results.out.detach()[where], reference.out, reference.size_of_out, pick, pick.rows)
        if results.lse is not None:
            size = reference.lse.abs().clamp_min(1.0).nan_to_num(posinf=1.0)
            got, want = results.lse.detach()[where], reference.lse
            yield _worst_row("lse", got[:, None], want[:, None], size[:, None], pick, pick.rows)


def _errors_of_gradients(
    grads: list[Tensor | None], picks: list[Pick], references: list[ReferenceRows], wanted: list[bool]
) -> Iterator[Compared]:
    """Yield the largest errors of a checked kernel's gradients, for each tensor that needs a gradient."""
    for index, name in enumerate(("query", "key", "value")):
        if not wanted[index]:
            continue
        totals: dict[tuple[int, int], tuple[Tensor, Tensor, Pick]] = {}
        for pick, reference in zip(picks, references, strict=True):
            grad, size = reference.grads[index], reference.sizes[index]
            assert grad is not None  # every output depends on each of these tensors
            where = (pick.item, pick.head if index == 0 else pick.group)
            before = totals.get(where)
            if before is not None:  # a different head of the same group
                grad, size = grad + before[0], (size.square() + before[1].square()).sqrt()
            totals[where] = (grad, size, pick)
        for (item, head), (grad, size, pick) in totals.items():
            rows = pick.rows if index == 0 else list(range(len(grad)))
            of_all = grads[index]
            got = torch.zeros_like(grad) if of_all is None else of_all[item, head, rows]
            yield _worst_row(f"gradient of {name}", got, grad, size, pick, rows)
    for number, index in enumerate([index for index in range(3, len(wanted)) if wanted[index]]):
        parts = [x for reference in references if (x := reference.grads[3 + number]) is not None]
        want = torch.stack(parts).sum(0) if parts else torch.zeros(())
        difference = (want if (got_all := grads[index]) is None else got_all - want).norm()
        size_of_all = math.hypot(*(reference.size_of_scores for reference in references)) + float(want.norm())
        error = float(difference) / size_of_all if size_of_all else float(difference > 0)
        name = "gradient of bias" if index == 3 else "gradient of a parameter"
        yield Compared(name, math.inf if math.isnan(error) else error, "all rows")


def _worst_row(name: str, got: Tensor, want: Tensor, size: Tensor, pick: Pick, rows: list[int]) -> Compared:
    """Return the largest error of the compared rows, each relative to the row's possible rounding error."""
    got = got.to(want.dtype)
    difference = torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    sizes = size.norm(dim=-1)
    floor = _FLOOR * sizes.square().mean().sqrt()
    errors = torch.where(difference.amax(-1) == 0.0, 0.0, difference.norm(dim=-1) / (sizes + floor)).nan_to_num(
        nan=math.inf
    )
    worst = int(errors.argmax())
    what = "key" if name in ("gradient of key", "gradient of value") else "query"
    return Compared(name, float(errors[worst]), f"{what} {rows[worst]} of batch item {pick.item}, head {pick.head}")


def _name_of(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return str(device)


_BLOCK, _RANDOM, _CUTS = 128, 4, 4  # rows that kernels process at once; numbers of random rows and of tile edges


class Pick(NamedTuple):
    """Rows of one head of one batch item that the first-use check compares."""

    item: int
    head: int
    group: int
    rows: list[int]


def picked_rows(inputs: AttentionInputs) -> Iterator[Pick]:
    """Yield the rows of a few heads to compare: rows in which kernels tend to be wrong, and some random rows."""
    batch, heads, q_len, _ = inputs.shape
    generator = torch.Generator().manual_seed(0)
    rows = {0, q_len - 1, _BLOCK - 1, _BLOCK, (q_len - 1) // _BLOCK * _BLOCK - 1, (q_len - 1) // _BLOCK * _BLOCK}
    rows |= set(torch.randint(q_len, (_RANDOM,), generator=generator).tolist())
    tiles = inputs.row_plan.tiles
    starts = [tile.rows.start for _, tile in zip(range(4 * _CUTS), tiles)]  # noqa: B905  the first of many
    rows |= {row + side for row in starts[:: max(1, len(starts) // _CUTS)] for side in (-1, 0)}
    inside = sorted(row for row in rows if 0 <= row < q_len)
    share = heads // inputs.key.shape[1]
    # A kernel that confuses groups of heads is still right for the first and the last head.
    chosen = {(0, 0), (0, 1 % heads), (0, share % heads), (batch - 1, heads - 1)}
    chosen.add((int(torch.randint(batch, (), generator=generator)), int(torch.randint(heads, (), generator=generator))))
    for item, head in sorted(chosen):
        yield Pick(item, head, head // share, inside)


class ReferenceRows(NamedTuple):
    """Reference rows for a `Pick`: results and gradients from the definition, and their possible rounding errors."""

    out: Tensor
    lse: Tensor
    size_of_out: Tensor
    grads: tuple[Tensor | None, ...]
    sizes: tuple[Tensor, ...]
    size_of_scores: float


def reference_rows(
    inputs: AttentionInputs, value: Tensor, pick: Pick, of_rows: Tensor, of_lse: Tensor, *, gradients: bool
) -> ReferenceRows:
    """Compute the reference rows of a `Pick` from the definition, in float64 if the device supports it.

    Args:
        inputs, value: inputs and values of the product.
        pick: the rows to compute.
        of_rows, of_lse: upstream gradients of the rows' outputs ``[rows, value_dim]`` and lse ``[rows]``.
        gradients: whether to compute gradients from ``of_rows`` and ``of_lse``.
    """
    wide = widest_dtype(inputs.device)
    wide_inputs = inputs.replaced(dtype=wide)
    q = inputs.query[pick.item, pick.head, pick.rows].to(wide)
    k, v = (x[pick.item, pick.group].to(wide) for x in (inputs.key, value))
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    bias = [] if inputs.bias is None else [inputs.bias.source]
    others = [x.detach().requires_grad_(x.requires_grad) for x in bias]
    others += [x.detach().to(wide).requires_grad_(x.requires_grad) for x in inputs.parameters]
    wide_inputs = wide_inputs.replaced(
        bias=None if inputs.bias is None else inputs.bias.of(others[0]), parameters=tuple(others[len(bias) :])
    )
    with torch.set_grad_enabled(gradients):
        parts = [_reference_row(wide_inputs, leaves, pick, number) for number in range(len(pick.rows))]
        out, lse, weights = (torch.stack([part[i] for part in parts]) for i in range(3))
    p, g = weights.detach(), of_rows.to(wide)
    is_nonempty = (lse.detach() > -math.inf).to(wide)
    size_of_out = ((p.square() @ v.square()).sqrt() + out.abs()).detach()
    grads: tuple[Tensor | None, ...] = ()
    sizes: tuple[Tensor, ...] = ()
    size_of_scores = 0.0
    if gradients:
        wanted = [*leaves, *(x for x in others if x.requires_grad)]
        target = (out * g).sum() + (lse.masked_fill(is_nonempty == 0, 0.0) * of_lse.to(wide) * is_nonempty).sum()
        grads = torch.autograd.grad(target, wanted, allow_unused=True)
        with torch.no_grad():
            taken = (out * g).sum(-1).abs() + of_lse.to(wide).abs()
            moved = (p * ((g @ v.T).abs() + taken[:, None])).square()
            scale = inputs.scale**2
            of_q, of_k = (moved @ k.square() * scale).sqrt(), (moved.T @ q.square() * scale).sqrt()
            sizes = (of_q, of_k, (p.square().T @ g.square()).sqrt())
            size_of_scores = float(moved.sum().sqrt())
    return ReferenceRows(out.detach(), lse.detach(), size_of_out, grads, sizes, size_of_scores)


def _reference_row(
    inputs: AttentionInputs, leaves: list[Tensor], pick: Pick, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, lse and weights of one complete reference row."""
    q, k, v = (x[None, None] for x in (leaves[0][number : number + 1], *leaves[1:]))
    row, kv_len = pick.rows[number], inputs.shape[3]
    item_and_head = (slice(pick.item, pick.item + 1), slice(pick.head, pick.head + 1))
    tile = Tile(*item_and_head, range(row, row + 1), (ColumnRange(range(kv_len), ("row", row)),), inputs.rule)
    scores = visible_scores(inputs, q, k, None if inputs.bias is None else inputs.bias.read(tile), tile)
    visible = allowed(inputs, tile)
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    weights, lse = normalised(scores)
    return product(weights, v)[0, 0, 0], lse[0, 0, 0], weights[0, 0, 0]
