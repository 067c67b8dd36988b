"""Locate a leak: find the first module that carries a change of a token to a row that it must not influence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.reachability import Reach
from saccade.auditing.token_axes import row_sums, tensors_of

Sums = tuple[list[Tensor], list[Tensor]]


def first_module(subject: ModelUnderTest, reach: Reach, key: tuple[int, int], vectors: Tensor) -> str:
    """Return the name of the first module that carries a change of a token to a row that must not see the token.

    Two runs are compared row by row and bit by bit: one with the original embeddings, and one with a different
    embedding of the token. A row shows a leak if no allowed path leads from the token to the row up to the module's
    layer, and if the module's output row differs between the runs although its input row does not.

    Returns:
        The name of the module in the model; empty if no module shows the leak.

    Cost: two forward passes, and 8 bytes for each row and module.
    """
    before, after = _Checksums(subject), _Checksums(subject)
    for recorder, changed in ((before, None), (after, vectors)):
        handles = [
            module.register_forward_hook(recorder.hook(name), with_kwargs=True)
            for name, module in subject.modules.items()
        ]
        try:
            subject.run(changed)
        finally:
            for handle in handles:
                handle.remove()
    one, layers = reach.one(*key), len(reach.rules)
    depths, second = [~reach.through(one, depth) for depth in range(layers + 1)], ""
    for name, (into, out) in after.found.items():
        first_into, first_out = before.found.get(name, ([], []))
        if not into or not out or len(into) != len(first_into) or len(out) != len(first_out):
            continue
        clean = depths[subject.layer_of(name, layers) + 1][:, subject.part_of(name)].flatten()
        unmoved = torch.stack([a == b for a, b in zip(into, first_into, strict=True)]).all(0)
        moved = torch.stack([a != b for a, b in zip(out, first_out, strict=True)]).any(0)
        if bool((clean & unmoved & moved).any()):
            if not bool((clean & ~unmoved).any()):
                return name.partition("#")[0]
            second = second or name.partition("#")[0]  # it may only pass on a leak of an enclosing module
    return second


class SavedRuns:
    """Checksums of two runs, to find the first module where they diverge.

    The runs may be of one model, or of two models with the same module names.

    Args:
        subject: the model and its input, which determine the layout of rows in tensors.
    """

    def __init__(self, subject: ModelUnderTest):
        self.subject, self._found = subject, list[dict[str, Sums]]()

    def run(self, modules: Mapping[str, nn.Module] | None = None, run: Callable[[], object] | None = None) -> None:
        """Run the model, or another model on the same texts, and save the checksums of all rows."""
        recorder, named = _Checksums(self.subject), self.subject.modules if modules is None else modules
        handles = [own.register_forward_hook(recorder.hook(name), with_kwargs=True) for name, own in named.items()]
        try:
            (run or self.subject.run)()
        finally:
            for handle in handles:
                handle.remove()
        self._found.append(recorder.found)

    def first_difference(self) -> str:
        """Return the name of the first module whose output rows differ between the runs although its input rows do not.

        If there is no such module, the name is empty.
        """
        first, second = self._found
        for name, (into, out) in second.items():
            other_into, other_out = first.get(name, ([], []))
            if into and len(into) == len(other_into) and len(out) == len(other_out):
                differs = not all(map(torch.equal, out, other_out))
                if differs and all(map(torch.equal, into, other_into)):
                    return name.partition("#")[0]
        return ""


class _Checksums:
    """Checksums of all input rows and output rows of each module call."""

    def __init__(self, subject: ModelUnderTest):
        self.subject, self.found = subject, dict[str, Sums]()
        self._calls: Counter[str] = Counter()

    def hook(self, name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            into = [*tensors_of(args), *tensors_of(kwargs)]
            self.found[f"{name}#{self._calls[name]}"] = (self._sums(name, into), self._sums(name, tensors_of(out)))
            self._calls[name] += 1

        return note

    def _sums(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        own, sums = self.subject.part_of(name), []
        for one in tensors:
            rows = self.subject.as_rows(name, one) if one.dim() > 1 else None
            if rows is not None:
                sums.append(row_sums(rows[0].flatten(0, 1)))
            elif one.dim() == 2 and len(one) == self.subject.shape[0] * (own.stop - own.start):
                sums.append(row_sums(one))
        return sums
