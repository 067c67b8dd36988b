"""Where a leak begins: the first module that changes a row whose input no changed token can have reached."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.reach import Reach
from saccade.auditing.subject import Subject

__all__ = ["first_module", "tensors_of"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = tuple[list[Tensor], list[Tensor]]


def tensors_of(value: Any) -> list[Tensor]:
    """Tensors of floats among the arguments or results of a module."""
    values = value if isinstance(value, tuple | list) else value.values() if isinstance(value, dict) else [value]
    return [one for one in values if isinstance(one, Tensor) and one.is_floating_point()]


def first_module(subject: Subject, reach: Reach, key: tuple[int, int], vectors: Tensor) -> str:
    """The name of the first module that carries a change of one token to a row that it must not reach.

    Two runs are compared, row by row and bit by bit: the model's own, and one with other vectors for the token. A row
    counts if so many layers up no path leads to it, if what goes into the module is the same there and what comes out
    is not.

    Returns:
        The name in the model; empty where hooks show nothing.

    Cost: two forward passes; 8 bytes for each row and module.
    """
    before, after = _Sums(subject), _Sums(subject)
    for recorder, given in ((before, None), (after, vectors)):
        handles = [
            module.register_forward_hook(recorder.hook(name), with_kwargs=True)
            for name, module in subject.modules.items()
        ]
        try:
            subject.run(given)
        finally:
            for handle in handles:
                handle.remove()
    one, layers = reach.one(*key), len(reach.rules)
    depths = [~reach.through(one, depth) for depth in range(layers + 1)]
    for name, (into, out) in after.found.items():
        first_into, first_out = before.found.get(name, ([], []))
        if not into or not out or len(into) != len(first_into) or len(out) != len(first_out):
            continue
        clean = depths[subject.layer_of(name, layers) + 1][:, subject.part_of(name)].flatten()
        unmoved = torch.stack([a == b for a, b in zip(into, first_into, strict=True)]).all(0)
        moved = torch.stack([a != b for a, b in zip(out, first_out, strict=True)]).any(0)
        if bool((clean & unmoved & moved).any()):
            return name.partition("#")[0]
    return ""


class _Sums:
    """A checksum of the bits of every row that goes into a module and comes out, call by call."""

    def __init__(self, subject: Subject):
        self.subject, self.found = subject, dict[str, Sums]()
        self._calls: Counter[str] = Counter()

    def hook(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            into, part = [*tensors_of(args), *tensors_of(kwargs)], self.subject.part_of(name)
            shape = (self.subject.shape[0], part.stop - part.start)
            self.found[f"{name}#{self._calls[name]}"] = (_sums(into, shape), _sums(tensors_of(out), shape))
            self._calls[name] += 1

        return note


def _sums(tensors: list[Tensor], shape: tuple[int, int]) -> list[Tensor]:
    size = shape[0] * shape[1]
    sums = []
    for one in tensors:
        if one.shape[:2] != shape and not (one.dim() == 2 and one.shape[0] == size):
            continue
        bits = one.detach().reshape(size, -1).contiguous().view(_BITS[one.element_size()]).long()
        sums.append((bits * torch.arange(1, 2 * bits.shape[1], 2, device=bits.device)).sum(1).cpu())
    return sums
