"""Find the token axis of tensors whose batch and length are equal, and compute checksums of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the floating-point tensors among a module's arguments or results."""
    values = value if isinstance(value, tuple | list) else value.values() if isinstance(value, dict) else [value]
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point()]


def row_sums(x: Tensor) -> Tensor:
    """Return a checksum of the bits of each row, with rows along the first axis, int64 ``[rows]``."""
    bits = x.detach().reshape(len(x), -1).contiguous().view(_BITS[x.element_size()]).long()
    return (bits * torch.arange(1, 2 * bits.shape[1], 2, device=bits.device)).sum(1).cpu()


def is_time_first(before: Tensor, after: Tensor) -> bool:
    """Return whether the token axis comes first, because a change of the first text changes only the first column.

    Args:
        before, after: the tensor ``[n, n, ...]`` without and with the change.
    """
    moved = (before != after).flatten(2).any(2) if before.dim() > 2 else before != after
    return int(moved.any(1).sum()) > 1 and moved.any(0).nonzero().flatten().tolist() == [0]


def names_time_first(
    modules: Mapping[str, nn.Module], run: Callable[[Tensor | None], object], other: Tensor
) -> frozenset[str]:
    """Return the names of modules whose tensors are ``[length, batch, ...]``, for models with equal batch and length.

    Args:
        modules: the modules by name.
        run: a function that runs the model on the given embeddings, or on its own tokens if it is given None.
        other: embeddings ``[batch, length, width]`` that differ from those of the tokens in the first text.

    Cost: two forward passes, and 8 bytes for each row of each module.
    """
    batch = len(other)

    def recorded(vectors: Tensor | None) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[..., None]:
            def note(module: nn.Module, args: object, out: object) -> None:
                rows = next((one for one in tensors_of(out) if tuple(one.shape[:2]) == (batch, batch)), None)
                if rows is not None:
                    found.setdefault(name, row_sums(rows.flatten(0, 1)).view(batch, batch))

            return note

        handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
        try:
            run(vectors)
        finally:
            for handle in handles:
                handle.remove()
        return found

    before, after = recorded(None), recorded(other)
    return frozenset(name for name in before.keys() & after.keys() if is_time_first(before[name], after[name]))
