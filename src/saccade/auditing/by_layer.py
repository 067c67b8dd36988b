"""Audit a model layer by layer: rerun each module that mixes tokens in place, and check it against its layer's rule.

End to end, a rule composed over many layers allows nearly all pairs, a correct layer can hide another layer's error,
and the influence of a token is a product of small weights. A check of a single module has none of these problems, so
it detects windows that are off by one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from saccade.auditing.finding import CounterExample, Kind
from saccade.auditing.is_attention import attends, reaching_others
from saccade.auditing.measured_rules import SeenRow, measured_rule
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.multi_process import broadcast_first
from saccade.auditing.probe_sets import LONG
from saccade.auditing.replay import replaying
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.zero_gradients import Probe, ZeroGradient, ZeroGradientReport, recheck

# In units of eps. Smaller changes may come from experts that sum in a different order, so gradients decide.
_ROUNDING = 64
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NO_ROWS = (nn.Linear, *_CONVOLUTIONS)


def mixers(subject: ModelUnderTest) -> dict[str, Tensor]:
    """Find the modules that mix tokens: the innermost modules with parameters whose rows depend on other rows.

    Each module that takes rows is rerun with half of the rows changed (or half of each text, if there are two). Modules
    that contain a mixing module are not rerun.

    Returns:
        A mapping from module names, in execution order, to bool ``[length]``: True at all tokens of each text in which
        the module mixes tokens.

    Cost: a forward pass, and one more pass for each level of nested modules that do not mix tokens.
    """
    found: dict[str, Tensor] = {}
    trained: list[str] = []

    def visit(name: str, rerun: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
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
            moved = row_differences(rerun(changed), out).masked_fill(half.to(out.device), 0)
            moved = broadcast_first(moved, subject.group)
            surely = float(moved.max()) > _ROUNDING * torch.finfo(out.dtype).eps
            if surely or (bool(moved.any()) and _depends(rerun, hidden, int(moved.argmax()), half)):
                found.setdefault(name, torch.zeros_like(chosen))[part] = True
        if name in found and any(True for _ in subject.modules[name].parameters()):
            trained.append(name)

    # Linear layers do not mix. A convolution's second axis is channels, not tokens, so its parent module is tested.
    modules = {name: own for name, own in subject.modules.items() if type(own) not in _NO_ROWS}
    with torch.no_grad(), replaying(subject, modules, visit):
        subject.run()
    names = trained or list(found)  # a module without parameters, such as RWKV's token shift, is only a part of a layer
    return {name: found[name] for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _depends(rerun: Callable[[Tensor], Tensor], hidden: Tensor, row: int, keys: Tensor) -> bool:
    """Return whether an output row of a module has a nonzero gradient with respect to any token in ``keys``.

    ``row`` is an index into the flattened ``[batch, length]``.
    """
    with torch.enable_grad():
        leaf = hidden.detach().clone().requires_grad_()
        rows = rerun(leaf).flatten(0, 1)
        if not rows.requires_grad:
            return True
        (grad,) = torch.autograd.grad(rows[row].sum(), leaf)
    return bool(grad[:, keys].any())


class ByLayer:
    """A check of all modules that mix tokens against the rules of their layers.

    Args:
        subject: the model and its input.
        mixed: the tokens that each module mixes, as `mixers` returns them. A module is not required to depend on any
            token outside this set.
        checked_rows: the rows to check, bool ``[batch, length]``.
        rows: approximate number of rows to test in each module; with 512 tokens or more, only three are tested.
        least: largest gradient that does not count as a leak, as a fraction of the row's largest gradient.

    Attributes:
        mixed: the argument ``mixed``, plus modules that mix more tokens than their submodules account for, in execution
            order.
        findings: for each module, the first leak and the first token that it should see but ignores.
        differentiable: names of the modules whose outputs have gradients. Only these modules are checked.
        attending: names of the modules that weight tokens by content. A module that mixes in other ways, such as a
            convolution, may see less than its layer allows.
        zero_gradients: the report on gradients that are 0 but should not be.
    """

    def __init__(
        self,
        subject: ModelUnderTest,
        mixed: Mapping[str, Tensor],
        checked_rows: Tensor,
        *,
        rows: int = 9,
        least: float = 1e-30,
    ):
        self.subject, self.mixed, self.checked_rows = subject, dict(mixed), checked_rows
        self.rows, self.least = rows, least
        self.findings: list[CounterExample] = []
        self.differentiable: set[str] = set()
        self.attending: set[str] = set()
        self.zero_gradients = ZeroGradientReport([], [], [])
        self._sizes: dict[Probe, Tensor] = {}

    def measure(self, positions: Collection[int] = ()) -> ByLayer:
        """Rerun all mixing modules during one forward pass, and measure which tokens some of their rows depend on.

        The rows are evenly spaced; the rows ``positions`` are measured in addition. Modules that contain a
        mixing module are also measured. Such a module mixes tokens itself if its rows depend on more tokens than its
        submodules account for: for example, a layer that convolves its keys in a submodule but computes attention with
        plain functions.
        """
        around, calls = {outer for name in self.mixed for outer in self._enclosing(name)}, list[str]()
        names = [*self.mixed, *around - set(self.mixed)]
        self._sizes = self._measure_gradients(
            self.subject, False, partial(self._probes, positions=positions), names, calls
        )
        for name in [one for one in dict.fromkeys(calls) if one not in self.mixed]:
            inner = [self._pairs(one) for one in self.mixed if one.startswith(f"{name}.")]
            if all(bool((~one.seen | _sequential_reach(inner, one)).all()) for one in self.measured_rows(name)):
                self._sizes = {probe: size for probe, size in self._sizes.items() if probe.module != name}
                self.attending.discard(name)
                self.differentiable.discard(name)
            else:
                tokens = {one: own for one, own in self.mixed.items() if one.startswith(f"{name}.")}
                self.mixed[name] = torch.stack([*tokens.values()]).any(0)
                if self.attending & tokens.keys():  # the attention is a separate submodule
                    self.attending.discard(name)
        self.mixed = {name: self.mixed[name] for name in (*calls, *self.mixed) if name in self.mixed}
        return self

    def measure_rows(self, positions: Collection[int], names: Sequence[str]) -> None:
        """Measure additional rows of the modules ``names``, such as the first row of each document."""
        added = sorted(positions)

        def probes(name: str, call: int) -> list[Probe]:
            span = self.subject.part_of(name)
            new = [Probe(name, call, position) for position in added if span.start <= position < span.stop]
            return [probe for probe in new if probe not in self._sizes]

        if added and names:
            self._sizes |= self._measure_gradients(self.subject, False, probes, names)

    def _enclosing(self, name: str) -> Iterator[str]:
        """Yield the names of the modules that enclose a module, up to its layer, and that may mix tokens themselves.

        The layer itself is included only if one of its direct children is a convolution.
        """
        parts, modules = name.split("."), self.subject.modules
        for count in range(len(parts) - 1, 0, -1):
            outer = ".".join(parts[:count])
            convolves = any(isinstance(own, _CONVOLUTIONS) for own in modules[outer].children())
            is_inside = not any(map(str.isdigit, parts)) or any(map(str.isdigit, parts[:count]))
            if is_inside and (convolves or not any(map(str.isdigit, parts[count - 1 :]))):
                yield outer

    def measured_rows(self, name: str) -> list[SeenRow]:
        """Return the measured rows of a module, each with the tokens for which its gradient is not 0."""
        found = [(probe.position, size) for probe, size in self._sizes.items() if probe.module == name]
        return [
            SeenRow((item, position), size[item] > self.least * size[item].max())
            for position, size in found
            for item in range(len(size))
            if self.checked_rows[item, position]
        ]

    def rules(self, documents: Tensor) -> dict[str, str]:
        """Return the rule that each module was measured to follow, as a string, by module name.

        Args:
            documents: the document index of each token, int ``[batch, length]``.
        """
        return {name: measured_rule(rows, documents) for name in self.mixed if (rows := self.measured_rows(name))}

    def distances(self, name: str) -> Tensor:
        """Extrapolate a module's measured pairs to all rows by distance, bool ``[length, length]``."""
        length = self.subject.shape[1]
        used = torch.zeros(2 * length, dtype=torch.bool)
        used[0] = True
        for measured in self.measured_rows(name):
            used[measured.row[1] - measured.seen.nonzero().flatten()] = True  # a negative index means a later token
        # Row q of the result is `used` read backwards from q, so all rows are windows of one vector.
        backwards = torch.cat([used[length + 1 :], used[:length]]).flip(0)
        return backwards.unfold(0, length, 1).flip(0)

    def _pairs(self, name: str) -> Tensor:
        """Return a module's pairs, bool ``[length, length]``; unmeasured rows are extrapolated by distance."""
        pairs, rows = self.distances(name), self.measured_rows(name)
        for position in {measured.row[1] for measured in rows}:
            pairs[position] = torch.stack([measured.seen for measured in rows if measured.row[1] == position]).any(0)
        return pairs

    def run(
        self, allowed: Callable[[str, int], Tensor], required: Callable[[str, int], Tensor] | None = None
    ) -> ByLayer:
        """Check all measured rows, and measure a row again if it seems to ignore a required token.

        Args:
            allowed: a function that returns the tokens that a row of a module may see, bool ``[batch, length]``.
            required: a function that returns the tokens that the row must see; ``allowed`` when None.
        """
        sizes = self._sizes
        zeros = list[ZeroGradient]()
        for probe, size in sizes.items():
            may = allowed(probe.module, probe.position)
            zeros += self._check_row(probe, size, may, required(probe.module, probe.position) if required else may)
        self.zero_gradients = self._without_ignorable(recheck(self.subject, zeros, sizes, self._remeasure), sizes)
        for one in self.zero_gradients.blind:
            keys = one.keys & ~_seen_in_layer(one.probe, sizes)
            if bool(keys.any()):
                self._record("blind", one.probe.module, one.row, one._replace(keys=keys).first, 0.0)
        return self

    def _without_ignorable(self, report: ZeroGradientReport, sizes: Mapping[Probe, Tensor]) -> ZeroGradientReport:
        """Return the report without tokens that modules other than attention may ignore.

        A convolution, for example, may ignore a token if another row sees it, or if no row sees any token at this
        distance.
        """
        names = {one.probe.module for one in (*report.blind, *report.unsure)} - self.attending
        reaching = dict[str, Tensor]()

        def visit(name: str, rerun: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
            with torch.enable_grad():
                leaf = hidden.detach().clone().requires_grad_()
                found = reaching_others(rerun(leaf), leaf)
            reaching[name] = reaching.get(name, False) | found

        if names:
            with replaying(self.subject, {name: self.subject.modules[name] for name in names}, visit):
                self.subject.run()

        def without_ignorable(zeros: list[ZeroGradient]) -> list[ZeroGradient]:
            near = [
                reaching[one.probe.module] | _unused_distances(one.probe, sizes)
                if one.probe.module in names
                else torch.zeros_like(one.keys)
                for one in zeros
            ]
            left = [one._replace(keys=one.keys & ~own) for one, own in zip(zeros, near, strict=True)]
            return [one for one in left if bool(one.keys.any())]

        return report._replace(blind=without_ignorable(report.blind), unsure=without_ignorable(report.unsure))

    def _remeasure(self, subject: ModelUnderTest, changed: bool, probes: Collection[Probe]) -> dict[Probe, Tensor]:
        chosen = [*dict.fromkeys(probe.module for probe in sorted(probes))]
        return self._measure_gradients(
            subject, changed, lambda *of: [one for one in sorted(probes) if one[:2] == of], chosen
        )

    def _measure_gradients(
        self,
        subject: ModelUnderTest,
        changed: bool,
        probes: Callable[[str, int], list[Probe]],
        names: Sequence[str],
        order: list[str] | None = None,
    ) -> dict[Probe, Tensor]:
        """Return, for each probe, the gradient of its row with respect to all tokens, float64 ``[batch, length]``.

        If ``changed`` is True, the modules run on different hidden states. After each call of a module, its name is
        appended to ``order``.
        """
        found: dict[Probe, Tensor] = {}
        calls = Counter[str]()

        def visit(name: str, rerun: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
            if order is not None:
                order.append(name)
            chosen = probes(name, calls[name])
            calls[name] += 1
            draw = torch.Generator().manual_seed(0)
            other = torch.randn(hidden.shape, generator=draw, dtype=torch.float64).to(hidden)
            with torch.enable_grad():
                leaf = (hidden + other * hidden.std() if changed else hidden).detach().clone().requires_grad_()
                try:
                    rows = rerun(leaf) if chosen else hidden
                except NotImplementedError:  # a kernel without a backward pass; the audit reports it
                    return
                if not rows.requires_grad:
                    return
                self.differentiable.add(name)
                if order is not None and attends(rows, leaf):
                    self.attending.add(name)
                for probe in chosen:
                    one = rows[:, probe.position]
                    weights = torch.randn(one.shape, generator=draw, dtype=torch.float64).to(rows)
                    (size,) = torch.autograd.grad(one, leaf, weights, retain_graph=True)
                    found[probe] = size.abs().flatten(2).amax(-1).cpu().double()

        modules = {name: subject.modules[name] for name in names}
        with replaying(subject, modules, visit):
            subject.run()
        return found

    def _probes(self, name: str, call: int, positions: Collection[int] = ()) -> list[Probe]:
        span = self.subject.part_of(name)
        length = span.stop - span.start
        step = max(1, length // self.rows)
        even = [*range(span.start + step // 2, span.stop, step), span.stop - 1, span.start]
        if length > LONG:
            even = [span.start + length // 3, span.start + 2 * length // 3, span.stop - 1]
        return [Probe(name, call, position) for position in sorted({*even, *positions, *self.subject.borders})]

    def _check_row(self, probe: Probe, size: Tensor, allowed: Tensor, required: Tensor) -> Iterator[ZeroGradient]:
        """Record leaks of a module's row, and yield the required tokens for which the row's gradient is 0."""
        name, _, position = probe
        itself = torch.arange(size.shape[1]) == position  # a row always depends on its own token, through the query
        for item in range(len(size)):
            if not self.checked_rows[item, position]:
                continue
            leaks = (size[item] > self.least * size[item].max()) & ~allowed[item] & ~itself
            if bool(leaks.any()):
                share = float(size[item][leaks].max() / size[item].max())
                self._record("leak", name, (item, position), (item, int(leaks.nonzero()[0])), share)
            expected = torch.zeros_like(self.checked_rows)
            expected[item] = required[item] & self.checked_rows[item] & self.mixed[name] & ~itself
            if bool((expected & (size == 0)).any()):
                yield ZeroGradient(probe, (item, position), expected, expected & (size == 0))

    def _record(self, kind: Kind, name: str, row: tuple[int, int], key: tuple[int, int], share: float) -> None:
        if not any((one.kind, one.module) == (kind, name) for one in self.findings):
            self.findings.append(CounterExample(kind, row, key, share, name, "replay", self.subject.passes))


def _unused_distances(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Return the tokens whose distance from the probed row is one at which no row of the module sees a token."""
    length = next(iter(sizes.values())).shape[1]
    used = torch.zeros(2 * length, dtype=torch.bool)
    for other, size in sizes.items():
        if other.module == probe.module:
            used[other.position - (size > 0).any(0).nonzero().flatten()] = True  # a negative index means a later token
    return ~used[probe.position - torch.arange(length)]


def _seen_in_layer(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Return the tokens that the probed row sees through any of the modules that mix tokens in its layer."""
    layer = _layer(probe.module)
    beside = [other for other in sizes if other.position == probe.position and _layer(other.module) == layer]
    return torch.stack([sizes[other] > 0 for other in beside]).any(0)


def _layer(name: str) -> str:
    """Return the name of a module's layer: the module name up to and including its first number."""
    return re.split(r"(?<=\d)(?!\d)", name, maxsplit=1)[0]


def _sequential_reach(pairs: Sequence[Tensor], measured: SeenRow) -> Tensor:
    """Return the tokens that a row sees through modules applied in sequence, each with a residual connection."""
    tokens = torch.arange(len(measured.seen)) == measured.row[1]
    for module_pairs in reversed(pairs):
        tokens = tokens | module_pairs[tokens].any(0)
    return tokens
