"""Running a kernel, and comparing a few of its rows with those of the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine import autograd
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernel_check.reference_rows import Pick, Truth, picks_of, truth_of
from saccade.engine.kernel_check.result import Compared, FirstUse
from saccade.engine.kernels.kernel import Kernel, Request

_LIMITS = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Limits of the largest error, in units of what rounding could move: a few dozen roundings of the dtype."""
_REDUCED = 1e-2  # of float32 where torch was told that products may be computed in fewer bits
_FLOOR = 0.1  # a row of less than a tenth of the usual size is judged by that


def check_kernel(kernel: Kernel, inputs: AttentionInputs, value: Tensor, *, gradients: bool) -> FirstUse:
    """Run a kernel, and compare some rows of some heads with the definition.

    Rows: the first, the last, those at both sides of a block's edge and of some tiles', and a few at random. Heads: the
    first two and the next group's first, of the first batch item; the last of the last; and one at random. An error is
    measured in units of what rounding could move: the root of the sum of the squares of the products that a number is
    the sum of.

    Args:
        kernel: what is looked at.
        inputs, value: finite, and not empty.
        gradients: whether to go back from these rows, too: to query, key, value and what else wants it.

    Cost: one product by the kernel, with gradients there and back; of the definition some rows of five heads.
    """
    limit = _LIMITS[inputs.dtype]
    if inputs.dtype == torch.float32 and not inputs.query.is_cpu and torch.get_float32_matmul_precision() != "highest":
        limit = _REDUCED
    picks = list(picks_of(inputs))
    raised: str | None = None
    quantities: tuple[Compared, ...] = ()
    try:
        quantities = _compared(kernel, inputs, value, picks, gradients)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise whatever they like; it is told, and another kernel runs
        raised = _told(error)
    return _found(kernel, inputs, value, sum(len(pick.rows) for pick in picks), limit, quantities, raised)


def after_error(kernel: Kernel, inputs: AttentionInputs, value: Tensor, error: Exception) -> FirstUse:
    """Return the result for a kernel that raised."""
    return _found(kernel, inputs, value, 0, 0.0, (), _told(error))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _found(
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


class _Answer(NamedTuple):
    """Results of a kernel, and the gradients that its backward pass starts from.

    Attributes:
        out, lse: its results; None for an lse that it says it does not give.
        of_rows, of_lse: gradients of the rows of each pick, which everything is asked to go back from.
    """

    out: Tensor
    lse: Tensor | None
    of_rows: list[Tensor]
    of_lse: list[Tensor]

    @classmethod
    def of(cls, kernel: Kernel, inputs: AttentionInputs, value: Tensor, picks: list[Pick]) -> _Answer:
        if kernel.has_backward and autograd.is_recorded(inputs, value):
            out, lse = autograd.differentiable(kernel, inputs, value, None)
        else:
            out, lse = kernel.forward(inputs, value, None)  # type: ignore[assignment]
        gives_lse = not kernel.verdict(inputs, Request(impl=kernel.name, needs_lse=True)).cannot
        drawn = torch.Generator().manual_seed(1)
        of_rows = [torch.randn(len(pick.rows), out.shape[3], generator=drawn).to(out) for pick in picks]
        of_lse = [torch.randn(len(pick.rows), generator=drawn).to(out) * gives_lse for pick in picks]
        return cls(out, lse if gives_lse else None, of_rows, of_lse)

    def gradients(self, picks: list[Pick], leaves: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Return gradients of all leaves, from the picked rows alone."""
        both = [(self.out, self.of_rows), (self.lse, self.of_lse)]
        parts = [(results, own) for results, own in both if results is not None and results.requires_grad]
        if not parts:
            return (None,) * len(leaves)
        wholes = []
        for results, own in parts:
            whole = torch.zeros_like(results)
            for pick, part in zip(picks, own, strict=True):
                whole[pick.item, pick.head, pick.rows] = part.to(whole.dtype)
            wholes.append(whole)
        return torch.autograd.grad([results for results, _ in parts], leaves, wholes, allow_unused=True)


def _compared(
    kernel: Kernel, inputs: AttentionInputs, value: Tensor, picks: list[Pick], gradients: bool
) -> tuple[Compared, ...]:
    """Return the largest error of each quantity."""
    sources = inputs.sources(value)
    known = len(sources) - len(inputs.captured)  # a function of scores reads its tensors itself
    wanted = [gradients and x is not None and x.requires_grad for x in sources[:known]]
    leaves = [None if x is None else x.detach().requires_grad_(want) for x, want in zip(sources, wanted, strict=False)]
    own, values = inputs.of_sources((*leaves, *inputs.captured))
    # Whatever else listens to what autograd keeps (checkpoints do) must not hear of this.
    with torch.set_grad_enabled(gradients), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        answer = _Answer.of(kernel, own, values, picks)
        truths = [
            truth_of(own, values, pick, of_rows, of_lse, gradients=any(wanted))
            for pick, of_rows, of_lse in zip(picks, answer.of_rows, answer.of_lse, strict=True)
        ]
        found = list(_of_results(answer, picks, truths))
        if any(wanted):
            asked = [x for x in leaves if x is not None and x.requires_grad]
            grads = iter(answer.gradients(picks, asked))
            found += _of_gradients([next(grads) if want else None for want in wanted], picks, truths, wanted)
    names = dict.fromkeys(one.name for one in found)
    return tuple(max((one for one in found if one.name == name), key=lambda one: one.error) for name in names)


def _same(x: Tensor) -> Tensor:
    return x


def _of_results(answer: _Answer, picks: list[Pick], truths: list[Truth]) -> Iterator[Compared]:
    """Errors of outputs and lse."""
    for pick, truth in zip(picks, truths, strict=True):
        where = (pick.item, pick.head, pick.rows)
        yield _worst("output", answer.out.detach()[where], truth.out, truth.size_of_out, pick, pick.rows)
        if answer.lse is not None:
            size = truth.lse.abs().clamp_min(1.0).nan_to_num(posinf=1.0)
            got, want = answer.lse.detach()[where], truth.lse
            yield _worst("lse", got[:, None], want[:, None], size[:, None], pick, pick.rows)


def _of_gradients(
    grads: list[Tensor | None], picks: list[Pick], truths: list[Truth], wanted: list[bool]
) -> Iterator[Compared]:
    """Errors of the gradients that go back from the rows that were picked."""
    for place, name in enumerate(("query", "key", "value")):
        if not wanted[place]:
            continue
        totals: dict[tuple[int, int], tuple[Tensor, Tensor, Pick]] = {}
        for pick, truth in zip(picks, truths, strict=True):
            grad, size = truth.grads[place], truth.sizes[place]
            assert grad is not None  # every output depends on it
            where = (pick.item, pick.head if place == 0 else pick.group)
            before = totals.get(where)
            if before is not None:  # another head of the same group
                grad, size = grad + before[0], (size.square() + before[1].square()).sqrt()
            totals[where] = (grad, size, pick)
        for (item, head), (grad, size, pick) in totals.items():
            rows = pick.rows if place == 0 else list(range(len(grad)))
            of_all = grads[place]
            got = torch.zeros_like(grad) if of_all is None else of_all[item, head, rows]
            yield _worst(f"gradient of {name}", got, grad, size, pick, rows)
    for number, place in enumerate([place for place in range(3, len(wanted)) if wanted[place]]):
        parts = [x for truth in truths if (x := truth.grads[3 + number]) is not None]
        want = torch.stack(parts).sum(0) if parts else torch.zeros(())
        missed = (want if (got_all := grads[place]) is None else got_all - want).norm()
        size_of_all = math.hypot(*(truth.size_of_scores for truth in truths)) + float(want.norm())
        error = float(missed) / size_of_all if size_of_all else float(missed > 0)
        name = "gradient of bias" if place == 3 else "gradient of a parameter"
        yield Compared(name, math.inf if math.isnan(error) else error, "all rows")


def _worst(name: str, got: Tensor, want: Tensor, size: Tensor, pick: Pick, rows: list[int]) -> Compared:
    """Return the row whose error is the largest part of its own size."""
    got = got.to(want.dtype)
    missed = torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    sizes = size.norm(dim=-1)
    floor = _FLOOR * sizes.square().mean().sqrt()
    errors = torch.where(missed.amax(-1) == 0.0, 0.0, missed.norm(dim=-1) / (sizes + floor)).nan_to_num(nan=math.inf)
    worst = int(errors.argmax())
    what = "key" if name in ("gradient of key", "gradient of value") else "query"
    return Compared(name, float(errors[worst]), f"{what} {rows[worst]} of batch item {pick.item}, head {pick.head}")


def _name_of(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return str(device)
