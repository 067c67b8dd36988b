"""Audit a model layer by layer: run each module that mixes tokens again in place, and check the rule of its layer.

End to end, a rule composed over many layers allows nearly all pairs, a correct layer can hide the error of another,
and the influence of a token is a product of small weights. A single module has none of these problems, so this check
detects windows that are off by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.finding import CounterExample, Kind
from saccade.auditing.is_attention import attends, reaching_others
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.multi_process import broadcast_first, shared
from saccade.auditing.probe_sets import LONG
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.token_axes import tensors_of
from saccade.auditing.zero_gradients import Probe, ZeroGradient, ZeroGradientReport, recheck

# A second run must not find the keys that the first one stored.
_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params")
_ROUNDING = 64  # units; experts may sum in a different order without mixing, so gradients check smaller changes
_NO_ROWS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HIDDEN = ("hidden_states", "x", "query", "inputs")  # names of keyword arguments that hold the rows that modules mix


def mixers(subject: ModelUnderTest) -> dict[str, Tensor]:
    """Find the modules that mix tokens: innermost modules with parameters whose output rows depend on other input rows.

    Each module that takes rows runs once more with half of the rows changed (or half of each text, if there are two).
    Modules that contain a mixing module are not run again.

    Returns:
        A mapping from module names, in running order, to the tokens of the texts that the module mixes, bool
        ``[length]``.

    Cost: a forward pass, and one more pass for each level of nested modules that do not mix tokens.
    """
    found: dict[str, Tensor] = {}
    trained: list[str] = []

    def look(name: str, again: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
        if any(inner.startswith(f"{name}.") for inner in trained):
            return
        draw = torch.Generator().manual_seed(0)
        chosen = torch.rand(hidden.shape[1], generator=draw) < 0.5
        other = torch.randn(hidden.shape, generator=draw).to(hidden)
        for part in subject.parts.values():
            half = torch.zeros_like(chosen)
            half[part] = chosen[part]
            changed = hidden.clone()
            changed[:, half] += other[:, half]
            moved = row_differences(again(changed), out).masked_fill(half.to(out.device), 0)
            moved = broadcast_first(moved, subject.group)
            surely = float(moved.max()) > _ROUNDING * torch.finfo(out.dtype).eps
            if surely or (bool(moved.any()) and _depends(again, hidden, int(moved.argmax()), half)):
                found.setdefault(name, torch.zeros_like(chosen))[part] = True
        if name in found and any(True for _ in subject.modules[name].parameters()):
            trained.append(name)

    # Linear layers do not mix. A convolution has channels where others have rows, so its parent module is tested.
    modules = {name: own for name, own in subject.modules.items() if type(own) not in _NO_ROWS}
    with torch.no_grad(), _again(subject, modules, look):
        subject.run()
    names = trained or list(found)  # a module without parameters, such as RWKV's token shift, is only a part of a layer
    return {name: found[name] for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _depends(again: Callable[[Tensor], Tensor], hidden: Tensor, row: int, keys: Tensor) -> bool:
    """Return whether a module's row, indexed across the batch, has a nonzero gradient for any token of ``keys``."""
    with torch.enable_grad():
        leaf = hidden.detach().clone().requires_grad_()
        rows = again(leaf).flatten(0, 1)
        if not rows.requires_grad:
            return True
        (grad,) = torch.autograd.grad(rows[row].sum(), leaf)
    return bool(grad[:, keys].any())


class ByLayer:
    """The check of mixing modules against the rules of their layers.

    Args:
        subject: the model and its input.
        allowed: the pairs that the layer of each module allows, bool ``[batch, length, length]``, by module name.
        mixed: the tokens that each module mixes, as `mixers` returns them. A module need not see other tokens.
        judged: the rows to check, bool ``[batch, length]``.
        rows: number of rows of each module to test; only three for more than 512 tokens.
        least: largest gradient that does not count as a leak, as a share of the largest gradient of the row.

    Attributes:
        findings: the first leak and the first blind pair of each module.
        looked_at: names of the modules that were checked because their outputs have gradients.
        attending: names of the modules that weight tokens by content. A module that mixes in other ways, such as a
            convolution, may see less than its layer allows.
        near: names of the modules that see less for this reason. Each token that a row of such a module does not see
            influences a different row, or lies at a distance where no row sees a token.
        zero_gradients: the report on gradients that are 0 but should not be 0.
    """

    def __init__(
        self,
        subject: ModelUnderTest,
        allowed: Mapping[str, Tensor],
        mixed: Mapping[str, Tensor],
        judged: Tensor,
        *,
        rows: int = 9,
        least: float = 1e-30,
    ):
        self.subject, self.allowed, self.mixed, self.judged = subject, allowed, mixed, judged
        self.rows, self.least = rows, least
        self.findings: list[CounterExample] = []
        self.looked_at: set[str] = set()
        self.attending: set[str] = set()
        self.near: list[str] = []
        self.zero_gradients = ZeroGradientReport([], [], [])

    def run(self) -> ByLayer:
        """Run all mixing modules again during one forward pass, and then rerun those that seem blind to a token."""
        sizes = self._pulled(self.subject, False, self._probes)
        zeros = [one for probe, size in sizes.items() for one in self._judge(probe, size)]
        self.zero_gradients = self._without_near(recheck(self.subject, zeros, sizes, self._pull_again), sizes)
        for one in self.zero_gradients.blind:
            keys = one.keys & ~_seen_beside(one.probe, sizes)
            if bool(keys.any()):
                self._note("blind", one.probe.module, one.row, one._replace(keys=keys).first, 0.0)
        return self

    def _without_near(self, report: ZeroGradientReport, sizes: Mapping[Probe, Tensor]) -> ZeroGradientReport:
        """Return the report without tokens that modules other than attention may ignore.

        A convolution, for example, may ignore a token if a different row sees the token, or if no row sees any token
        at this distance.
        """
        names = {one.probe.module for one in (*report.blind, *report.unsure)} - self.attending
        reaching = dict[str, Tensor]()

        def look(name: str, again: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
            with torch.enable_grad():
                leaf = hidden.detach().clone().requires_grad_()
                found = reaching_others(again(leaf), leaf)
            reaching[name] = reaching.get(name, False) | found

        if names:
            with _again(self.subject, {name: self.subject.modules[name] for name in names}, look):
                self.subject.run()

        def narrowed(zeros: list[ZeroGradient]) -> list[ZeroGradient]:
            near = [
                reaching[one.probe.module] | _unused_distances(one.probe, sizes)
                if one.probe.module in names
                else torch.zeros_like(one.keys)
                for one in zeros
            ]
            left = [one._replace(keys=one.keys & ~own) for one, own in zip(zeros, near, strict=True)]
            return [one for one in left if bool(one.keys.any())]

        left = report._replace(blind=narrowed(report.blind), unsure=narrowed(report.unsure))
        self.near = sorted(names - {one.probe.module for one in (*left.blind, *left.unsure)})
        return left

    def _pull_again(self, subject: ModelUnderTest, changed: bool, probes: Collection[Probe]) -> dict[Probe, Tensor]:
        return self._pulled(subject, changed, lambda *of: [probe for probe in sorted(probes) if probe[:2] == of])

    def _pulled(
        self, subject: ModelUnderTest, changed: bool, probes: Callable[[str, int], list[Probe]]
    ) -> dict[Probe, Tensor]:
        """Return gradient sizes of the probed rows of modules, float64 ``[batch, length]``, by probe.

        With ``changed``, the modules run on different hidden states.
        """
        found: dict[Probe, Tensor] = {}
        calls = Counter[str]()

        def look(name: str, again: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
            chosen = probes(name, calls[name])
            calls[name] += 1
            draw = torch.Generator().manual_seed(0)
            other = torch.randn(hidden.shape, generator=draw, dtype=torch.float64).to(hidden)
            with torch.enable_grad():
                leaf = (hidden + other * hidden.std() if changed else hidden).detach().clone().requires_grad_()
                try:
                    rows = again(leaf) if chosen else hidden
                except NotImplementedError:  # a kernel without a backward pass; the audit reports it
                    return
                if not rows.requires_grad:
                    return
                self.looked_at.add(name)
                if attends(rows, leaf):
                    self.attending.add(name)
                for probe in chosen:
                    one = rows[:, probe.place]
                    weights = torch.randn(one.shape, generator=draw, dtype=torch.float64).to(rows)
                    (size,) = torch.autograd.grad(one, leaf, weights, retain_graph=True)
                    found[probe] = size.abs().flatten(2).amax(-1).cpu().double()

        modules = {name: module for name, module in subject.modules.items() if name in self.allowed}
        with _again(subject, modules, look):
            subject.run()
        return found

    def _probes(self, name: str, call: int) -> list[Probe]:
        own = self.subject.part_of(name)
        length = own.stop - own.start
        step = max(1, length // self.rows)
        places = [*range(own.start + step // 2, own.stop, step), own.stop - 1, own.start]
        if length > LONG:
            places = [own.start + length // 3, own.start + 2 * length // 3, own.stop - 1]
        return [Probe(name, call, place) for place in sorted({*places, *self.subject.borders})]

    def _judge(self, probe: Probe, size: Tensor) -> Iterator[ZeroGradient]:
        """Record leaks of a module's row, and yield the allowed tokens for which the row's gradient is 0."""
        name, _, place = probe
        allowed = self.allowed[name][:, place]
        itself = torch.arange(size.shape[1]) == place  # a row always depends on its own token, through the query
        for item in range(len(size)):
            if not self.judged[item, place]:
                continue
            leaks = (size[item] > self.least * size[item].max()) & ~allowed[item] & ~itself
            if bool(leaks.any()):
                share = float(size[item][leaks].max() / size[item].max())
                self._note("leak", name, (item, place), (item, int(leaks.nonzero()[0])), share)
            shown = torch.zeros_like(self.judged)
            shown[item] = allowed[item] & self.judged[item] & self.mixed[name] & ~itself
            if bool((shown & (size == 0)).any()):
                yield ZeroGradient(probe, (item, place), shown, shown & (size == 0))

    def _note(self, kind: Kind, name: str, row: tuple[int, int], key: tuple[int, int], share: float) -> None:
        if not any((one.kind, one.module) == (kind, name) for one in self.findings):
            self.findings.append(CounterExample(kind, row, key, share, name, "replay", self.subject.passes))


def _unused_distances(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Return the tokens at distances from the row at which no row of the module sees a token, bool ``[length]``."""
    length = next(iter(sizes.values())).shape[1]
    used = torch.zeros(2 * length, dtype=torch.bool)
    for other, size in sizes.items():
        if other.module == probe.module:
            used[other.place - (size > 0).any(0).nonzero().flatten()] = True  # a negative index means a later token
    return ~used[probe.place - torch.arange(length)]


def _seen_beside(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Return the tokens that any module of a layer sees from the probed row, as several modules may mix tokens."""
    layer = _layer(probe.module)
    beside = [other for other in sizes if other.place == probe.place and _layer(other.module) == layer]
    return torch.stack([sizes[other] > 0 for other in beside]).any(0)


def _layer(name: str) -> str:
    """Return the name of a module's layer, which is the module name up to the first number."""
    return re.split(r"(?<=\d)(?!\d)", name, maxsplit=1)[0]


@contextmanager
def _again(
    subject: ModelUnderTest,
    modules: Mapping[str, nn.Module],
    look: Callable[[str, Callable[[Tensor], Tensor], Tensor, Tensor], None],
) -> Iterator[None]:
    """Call ``look`` after each module that takes rows, with a function that runs the module again.

    This applies to calls within the block. Inputs and outputs are ``[batch, length, ...]`` with a row for each token,
    which is 0 for tokens that the module does not get.
    """
    running = False

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            nonlocal running
            own, found = subject.part_of(name), tensors_of(out)
            places = {} if running else _hidden(subject, name, args, kwargs)
            if not places or not found or found[0].dim() < 3:  # a tensor of two dimensions may hold pooled rows
                return
            rows = subject.as_rows(name, found[0])
            if rows is None:
                return
            uncached = {name: None if name in _CACHES else value for name, value in kwargs.items()}

            def again(other: Tensor) -> Tensor:
                other = shared(other, subject.group)
                # Keep identical arguments identical, because modules test whether the query is the key.
                parts = {one.key: one.with_rows(other) for one in places.values()}
                changed = {place: parts[one.key] for place, one in places.items()}
                positional = [changed.get(place, one) for place, one in enumerate(args)]
                named = {name: changed.get(name, one) for name, one in uncached.items()}
                result = tensors_of(module(*positional, **named))[0]
                return _spread([(result.transpose(0, 1) if rows[1] else result, own)], subject.shape[1])

            running = True
            try:
                look(
                    name,
                    again,
                    _spread([(one.rows, one.part) for one in places.values()], subject.shape[1]),
                    _spread([(rows[0], own)], subject.shape[1]),
                )
            finally:
                running = False

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Argument(NamedTuple):
    """A module's argument that holds rows of tokens.

    Args:
        rows: ``[batch, length, ...]``.
        part: the range of tokens that the rows belong to.
        is_turned: whether the module takes the rows as ``[length, batch, ...]``.
    """

    rows: Tensor
    part: slice
    is_turned: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        """A dictionary key for the argument, equal for arguments that were the same tensor."""
        return self.part.start, self.part.stop, self.is_turned

    def with_rows(self, other: Tensor) -> Tensor:
        """Return a new value for this argument, in its layout: the rows of its tokens, from the rows of all tokens."""
        own = other[:, self.part]
        return (own.transpose(0, 1) if self.is_turned else own).contiguous()


def _hidden(
    subject: ModelUnderTest, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int | str, _Argument]:
    """Return the arguments of a module that hold rows of its text, or rows of another text that it attends to.

    The first such argument holds the module's rows, as do all arguments equal to it, as in ``attention(x, x, x)``.
    """
    own, found = subject.part_of(name), dict[int | str, _Argument]()
    first: Tensor | None = None
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, one in given:
        if not isinstance(one, Tensor) or not one.is_floating_point() or one.dim() < 3:
            continue
        if (other := subject.read_from(one)) is not None and other != own:
            found[place] = _Argument(one, other)
        elif first is None and (isinstance(place, int) or place in _HIDDEN):
            if (rows := subject.as_rows(name, one)) is not None:
                found[place], first, known = _Argument(rows[0], own, rows[1]), one, place
        elif first is not None and _is_same(one, first):
            found[place] = found[known]
    return {} if first is None else found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def _spread(rows: Iterable[tuple[Tensor, slice]], length: int) -> Tensor:
    """Combine a module's rows for ranges of tokens into one tensor with a row for each token, 0 for missing rows."""
    rows = list(rows)
    first, part = rows[0]
    if len(rows) == 1 and part == slice(0, length):
        return first
    out = first.new_zeros(len(first), length, *first.shape[2:])
    for one, part in rows:
        out[:, part] = one
    return out
