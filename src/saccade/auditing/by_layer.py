"""Layer by layer: each module that mixes tokens, run again in its place and held against the rule of its own layer.

A rule closed over many layers allows nearly all, one right layer hides what another leaves out, and what passes through
many is a product of small weights. A module by itself has none of these: this finds windows that are one off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.auditing.finding import Finding, Kind
from saccade.auditing.noise import row_differences
from saccade.auditing.place import tensors_of
from saccade.auditing.subject import Subject

__all__ = ["ByLayer", "mixers"]

# A second run must not find the first one's keys.
_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params")
_ROUNDING = 64  # units: experts sum in another order if other tokens come to them, and mix nothing
_HIDDEN = ("hidden_states", "x", "query", "inputs")  # names under which modules take what they mix


def mixers(subject: Subject) -> list[str]:
    """Names of the innermost modules in which a row of the output depends on another row of the input.

    Each module that is given rows runs once more, with half of them changed.

    Cost: about as many forward passes as modules lie in one another.
    """
    found: list[str] = []

    def look(name: str, again: Callable[[Tensor], Any], hidden: Tensor, out: Tensor) -> None:
        draw = torch.Generator().manual_seed(0)
        chosen = torch.rand(hidden.shape[1], generator=draw) < 0.5  # as good as any half
        other = torch.randn(hidden.shape, generator=draw).to(hidden)
        changed = hidden.clone()
        changed[:, chosen] += other[:, chosen]
        moved = row_differences(_rows(again(changed)), out)[:, ~chosen]
        if float(moved.max()) > _ROUNDING * torch.finfo(out.dtype).eps:
            found.append(name)

    with torch.no_grad(), _again(subject, subject.modules, look):
        subject.run()
    return [name for name in found if not any(other.startswith(f"{name}.") for other in found)]


class ByLayer:
    """Mixing modules held against the rule of their layer.

    Args:
        subject: the model and its input.
        allowed: for each module by name, what its layer allows, bool ``[batch, length, length]``.
        judged: rows that say something, bool ``[batch, length]``.
        rows: how many rows of each module to look at.
        least: gradients up to this share of the largest in their row are none.

    Attributes:
        findings: the first leak and the first blind pair of each module.
        looked_at: names of the modules whose outputs have gradients, and so were judged.
    """

    def __init__(
        self, subject: Subject, allowed: Mapping[str, Tensor], judged: Tensor, *, rows: int = 9, least: float = 1e-30
    ):
        self.subject, self.allowed, self.judged = subject, allowed, judged
        self.rows, self.least = rows, least
        self.findings: list[Finding] = []
        self.looked_at: set[str] = set()

    def run(self) -> ByLayer:
        """Replay all of them in one forward pass."""
        chosen = {name: module for name, module in self.subject.modules.items() if name in self.allowed}
        with _again(self.subject, chosen, self._look):
            self.subject.run()
        return self

    def _look(self, name: str, again: Callable[[Tensor], Any], hidden: Tensor, out: Tensor) -> None:
        with torch.enable_grad():
            leaf = hidden.detach().clone().requires_grad_()
            rows = _rows(again(leaf))
            if not rows.requires_grad:
                return
            self.looked_at.add(name)
            draw = torch.Generator().manual_seed(0)
            for place in self._places(hidden.shape[1]):
                weights = torch.randn(rows[:, place].shape, generator=draw, dtype=torch.float64).to(rows)
                (found,) = torch.autograd.grad(rows[:, place], leaf, weights, retain_graph=True)
                self._judge(name, place, found.abs().flatten(2).amax(-1).double().cpu())

    def _places(self, length: int) -> list[int]:
        step = max(1, length // self.rows)
        return sorted({*range(step // 2, length, step), length - 1, 0})

    def _judge(self, name: str, place: int, size: Tensor) -> None:
        allowed = self.allowed[name][:, place]
        for item in range(len(size)):
            if not self.judged[item, place]:
                continue
            reached = size[item] > self.least * size[item].max()
            reached[place] = allowed[item, place]  # its own query always reaches it
            self._note("leak", name, (item, place), reached & ~allowed[item], size[item])
            self._note("blind", name, (item, place), ~reached & allowed[item] & self.judged[item], size[item])

    def _note(self, kind: Kind, name: str, row: tuple[int, int], bad: Tensor, size: Tensor) -> None:
        if not bool(bad.any()) or any((one.kind, one.module) == (kind, name) for one in self.findings):
            return
        key = (row[0], int(bad.nonzero()[0]))
        share = float(size[bad].max() / size.max().clamp_min(1e-300))
        self.findings.append(Finding(kind, row, key, share, name, "replay", self.subject.passes))


def _rows(out: Any) -> Tensor:
    return tensors_of(out)[0]


@contextmanager
def _again(
    subject: Subject,
    modules: Mapping[str, nn.Module],
    look: Callable[[str, Callable[[Tensor], Any], Tensor, Tensor], None],
) -> Iterator[None]:
    """While this lasts, ``look`` is called after each module that is given rows: with a way to run it once more."""
    running = False

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            nonlocal running
            place, hidden = _hidden(args, kwargs, subject.shape)
            found = tensors_of(out)
            if running or hidden is None or not found or found[0].shape[:2] != subject.shape:
                return
            kept = {name: None if name in _CACHES else value for name, value in kwargs.items()}

            def again(other: Tensor) -> Any:
                if isinstance(place, int):
                    return module(*args[:place], other, *args[place + 1 :], **kept)
                return module(*args, **kept | {place: other})

            running = True
            try:
                look(name, again, hidden, found[0])
            finally:
                running = False

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hidden(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[int | str, Tensor | None]:
    """The first argument that holds rows, and where it stands."""
    named: list[tuple[int | str, Any]] = [
        *enumerate(args),
        *((name, kwargs[name]) for name in _HIDDEN if name in kwargs),
    ]
    for place, one in named:
        if isinstance(one, Tensor) and one.is_floating_point() and one.dim() >= 3 and one.shape[:2] == shape:
            return place, one
    return "", None
