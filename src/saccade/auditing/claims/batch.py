"""The claim that no item of a batch depends on another item."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.auditing.claims.model_measurements import ModelMeasurements, first_of, result
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.model_under_test import ModelUnderTest, NoGradientError
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.token_axes import tensors_of

_ITEMS = 4  # number of items whose influence is measured


def batch(measured: ModelMeasurements) -> list[ClaimResult]:
    """Check by gradients and changes that batch items are independent; if not, name the first module that leaks.

    Gradients also detect influences that cancel except for rounding, such as a maximum over the batch that is
    subtracted and later added.
    """
    subject = measured.subject
    if subject.shape[0] < 2:
        return [ClaimResult("batch", "not answered", why="it needs a batch of at least two items")]
    found = _by_gradients(measured) or _by_changes(measured)
    return [result("batch", found)]


def _by_changes(measured: ModelMeasurements) -> CounterExample | None:
    subject, draw = measured.subject, torch.Generator().manual_seed(measured.seed)
    for item in range(min(_ITEMS, subject.shape[0])):
        vectors = subject.vectors.clone()
        other = torch.randn(vectors[item].shape, generator=draw, dtype=torch.float64).to(vectors)
        vectors[item] = other * 4 * vectors.std()
        moved = row_differences(subject.run(vectors), subject.rows).cpu().masked_fill(~measured.checked_rows, 0)
        moved[item] = 0
        size = float(moved.max())
        if size and size > measured.noise():
            row = first_of(moved == moved.max())
            module = _first_module(subject, item)
            return CounterExample("leak", row, (item, 0), size, module, "change", subject.passes)
    return None


def _by_gradients(measured: ModelMeasurements) -> CounterExample | None:
    subject = measured.subject
    try:
        leaf, out = subject.graph()
    except NoGradientError:
        return None
    draw = torch.Generator().manual_seed(measured.seed)
    for item in range(min(_ITEMS, subject.shape[0])):
        weights = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out)
        weights *= measured.checked_rows.to(out).view(*measured.checked_rows.shape, *[1] * (out.dim() - 2))
        weights[item] = 0
        (size,) = torch.autograd.grad(out, leaf, weights, retain_graph=True)
        if bool((own := size[item].flatten(1).abs().amax(-1)).any()):
            key = (item, int(own.argmax()))
            row = (int(item == 0), 0)
            share = float(own.max() / size.abs().max())
            module = _first_module(subject, item)
            return CounterExample("leak", row, key, share, module, "gradient", subject.passes)
    return None


def _first_module(subject: ModelUnderTest, item: int) -> str:
    """Return the name of the first module that mixes ``item`` into rows of other items, or "" if none is detected.

    The module's output rows of other items have gradients with respect to the embeddings of ``item``, but its input
    rows do not.
    """
    calls: list[tuple[str, list[Tensor], list[Tensor]]] = []

    def rows(name: str, value: object) -> list[Tensor]:
        found = [subject.as_rows(name, one) for one in tensors_of(value) if one.dim() > 1 and one.requires_grad]
        return [one[0] for one in found if one is not None]

    def hook(name: str) -> Any:
        def note(module: object, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            calls.append((name, rows(name, args) + rows(name, kwargs), rows(name, out)))

        return note

    handles = [own.register_forward_hook(hook(name), with_kwargs=True) for name, own in subject.modules.items()]
    try:
        leaf, _ = subject.graph()
    finally:
        for handle in handles:
            handle.remove()

    def depends(of: Tensor) -> bool:
        weights = torch.randn(of.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(of)
        weights[item] = 0
        (size,) = torch.autograd.grad(of, leaf, weights, retain_graph=True, allow_unused=True)
        return size is not None and bool(size[item].any())

    mixing = (name for name, into, out in calls if any(map(depends, out)) and not any(map(depends, into)))
    return next(mixing, "")
