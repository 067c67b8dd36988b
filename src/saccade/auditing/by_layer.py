"""Layer by layer: each module that mixes tokens, run again in its place and held against the rule of its own layer.

A rule closed over many layers allows nearly all, one right layer hides what another leaves out, and what passes through
many is a product of small weights. A module by itself has none of these: this finds windows that are one off.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.finding import Finding, Kind
from saccade.auditing.is_attention import attends, reaching_others
from saccade.auditing.model_under_test import Subject
from saccade.auditing.multi_process import agreed, shared
from saccade.auditing.probe_sets import LONG
from saccade.auditing.rounding_noise import row_differences
from saccade.auditing.token_axes import tensors_of
from saccade.auditing.zero_gradients import Doubts, Probe, Unseen, looked_at_again

# A second run must not find the first one's keys.
_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params")
_ROUNDING = 64  # units; below, gradients tell: experts sum in another order if other tokens come, and mix nothing
_NO_ROWS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HIDDEN = ("hidden_states", "x", "query", "inputs")  # names under which modules take what they mix


def mixers(subject: Subject) -> dict[str, Tensor]:
    """The innermost modules with parameters in which a row of the output depends on another row of the input.

    Each module that is given rows runs once more, with half of them changed; with half of each text if there are two.
    What lies around one that mixes does not run again.

    Returns:
        By name, in the order in which they run: the tokens of the texts that it mixes in, bool ``[length]``.

    Cost: a forward pass, and one more for each level of modules that mix nothing.
    """
    found: dict[str, Tensor] = {}
    trained: list[str] = []

    def look(name: str, again: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
        if any(inner.startswith(f"{name}.") for inner in trained):
            return
        draw = torch.Generator().manual_seed(0)
        chosen = torch.rand(hidden.shape[1], generator=draw) < 0.5  # as good as any half
        other = torch.randn(hidden.shape, generator=draw).to(hidden)
        for part in subject.parts.values():
            half = torch.zeros_like(chosen)
            half[part] = chosen[part]
            changed = hidden.clone()
            changed[:, half] += other[:, half]
            moved = row_differences(again(changed), out).masked_fill(half.to(out.device), 0)
            moved = agreed(moved, subject.group)
            surely = float(moved.max()) > _ROUNDING * torch.finfo(out.dtype).eps
            if surely or (bool(moved.any()) and _depends(again, hidden, int(moved.argmax()), half)):
                found.setdefault(name, torch.zeros_like(chosen))[part] = True
        if name in found and any(True for _ in subject.modules[name].parameters()):
            trained.append(name)

    # A linear layer mixes none; a convolution has channels where rows are looked for, and the module around it rows.
    modules = {name: own for name, own in subject.modules.items() if type(own) not in _NO_ROWS}
    with torch.no_grad(), _again(subject, modules, look):
        subject.run()
    names = trained or list(found)  # what only moves tokens, as RWKV's shift, is a part of a layer
    return {name: found[name] for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _depends(again: Callable[[Tensor], Tensor], hidden: Tensor, row: int, keys: Tensor) -> bool:
    """Whether a row, counted through the batch, depends on some of these tokens by its gradient, not by rounding."""
    with torch.enable_grad():
        leaf = hidden.detach().clone().requires_grad_()
        rows = again(leaf).flatten(0, 1)
        if not rows.requires_grad:
            return True
        (found,) = torch.autograd.grad(rows[row].sum(), leaf)
    return bool(found[:, keys].any())


class ByLayer:
    """Mixing modules held against the rule of their layer.

    Args:
        subject: the model and its input.
        allowed: for each module by name, what its layer allows, bool ``[batch, length, length]``.
        mixed: and the tokens that it mixes in, as `mixers` finds them: of others it need not see what the layer allows.
        judged: rows that say something, bool ``[batch, length]``.
        rows: how many rows of each module to look at; three of more than 512.
        least: gradients up to this share of the largest in their row are no leak.

    Attributes:
        findings: the first leak and the first blind pair of each module.
        looked_at: names of the modules whose outputs have gradients, and so were judged.
        attending: names of the modules that weight tokens by what they hold. A module that mixes otherwise, such as a
            convolution, may reach less than its layer allows.
        near: names of those others that do: of each token that they hide from a row, some other row depends.
        doubts: what became of gradients that are 0 and should not be.
    """

    def __init__(
        self,
        subject: Subject,
        allowed: Mapping[str, Tensor],
        mixed: Mapping[str, Tensor],
        judged: Tensor,
        *,
        rows: int = 9,
        least: float = 1e-30,
    ):
        self.subject, self.allowed, self.mixed, self.judged = subject, allowed, mixed, judged
        self.rows, self.least = rows, least
        self.findings: list[Finding] = []
        self.looked_at: set[str] = set()
        self.attending: set[str] = set()
        self.near: list[str] = []
        self.doubts = Doubts([], [], [])

    def run(self) -> ByLayer:
        """Replay all of them in one forward pass, and once more those that seem blind."""
        sizes = self._pulled(self.subject, False, self._probes)
        unseen = [one for probe, size in sizes.items() for one in self._judge(probe, size)]
        self.doubts = self._without_near(looked_at_again(self.subject, unseen, sizes, self._pull_again), sizes)
        for one in self.doubts.blind:
            keys = one.keys & ~_seen_beside(one.probe, sizes)
            if bool(keys.any()):
                self._note("blind", one.probe.module, one.row, one._replace(keys=keys).first, 0.0)
        return self

    def _without_near(self, doubts: Doubts, sizes: Mapping[Probe, Tensor]) -> Doubts:
        """Return the doubts without what a module that does not attend may leave out.

        That is a token which another row sees, or at a distance at which no row sees any.
        """
        names = {one.probe.module for one in (*doubts.blind, *doubts.unsure)} - self.attending
        reaching = dict[str, Tensor]()

        def look(name: str, again: Callable[[Tensor], Tensor], hidden: Tensor, out: Tensor) -> None:
            with torch.enable_grad():
                leaf = hidden.detach().clone().requires_grad_()
                found = reaching_others(again(leaf), leaf)
            reaching[name] = reaching.get(name, False) | found

        if names:
            with _again(self.subject, {name: self.subject.modules[name] for name in names}, look):
                self.subject.run()

        def narrowed(unseen: list[Unseen]) -> list[Unseen]:
            near = [
                reaching[one.probe.module] | _unused_distances(one.probe, sizes)
                if one.probe.module in names
                else torch.zeros_like(one.keys)
                for one in unseen
            ]
            kept = [one._replace(keys=one.keys & ~own) for one, own in zip(unseen, near, strict=True)]
            return [one for one in kept if bool(one.keys.any())]

        left = doubts._replace(blind=narrowed(doubts.blind), unsure=narrowed(doubts.unsure))
        self.near = sorted(names - {one.probe.module for one in (*left.blind, *left.unsure)})
        return left

    def _pull_again(self, subject: Subject, changed: bool, probes: Collection[Probe]) -> dict[Probe, Tensor]:
        return self._pulled(subject, changed, lambda *of: [probe for probe in sorted(probes) if probe[:2] == of])

    def _pulled(
        self, subject: Subject, changed: bool, probes: Callable[[str, int], list[Probe]]
    ) -> dict[Probe, Tensor]:
        """How large the gradients of some rows are, float64 ``[batch, length]``; changed: on other hidden states."""
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
                except NotImplementedError:  # a kernel without a backward pass: not looked at, which the audit says
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

    def _judge(self, probe: Probe, size: Tensor) -> Iterator[Unseen]:
        """Notes leaks; yields what seems blind."""
        name, _, place = probe
        allowed = self.allowed[name][:, place]
        itself = torch.arange(size.shape[1]) == place  # its own query always reaches it
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
                yield Unseen(probe, (item, place), shown, shown & (size == 0))

    def _note(self, kind: Kind, name: str, row: tuple[int, int], key: tuple[int, int], share: float) -> None:
        if not any((one.kind, one.module) == (kind, name) for one in self.findings):
            self.findings.append(Finding(kind, row, key, share, name, "replay", self.subject.passes))


def _unused_distances(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Return the tokens at a distance from the row at which no row of the module sees any, bool ``[length]``."""
    length = next(iter(sizes.values())).shape[1]
    used = torch.zeros(2 * length, dtype=torch.bool)
    for other, size in sizes.items():
        if other.module == probe.module:
            used[other.place - (size > 0).any(0).nonzero().flatten()] = True  # from the end, if the token comes later
    return ~used[probe.place - torch.arange(length)]


def _seen_beside(probe: Probe, sizes: Mapping[Probe, Tensor]) -> Tensor:
    """Tokens that other modules of the same layer see from the same row: a layer may mix twice, once near alone."""
    layer = _layer(probe.module)
    beside = [other for other in sizes if other.place == probe.place and _layer(other.module) == layer]
    return torch.stack([sizes[other] > 0 for other in beside]).any(0)


def _layer(name: str) -> str:
    """The name up to its first number."""
    return re.split(r"(?<=\d)(?!\d)", name, maxsplit=1)[0]


@contextmanager
def _again(
    subject: Subject,
    modules: Mapping[str, nn.Module],
    look: Callable[[str, Callable[[Tensor], Tensor], Tensor, Tensor], None],
) -> Iterator[None]:
    """While this lasts, ``look`` is called after each module that is given rows: with a way to run it once more.

    What goes in, and what comes out, is ``[batch, length, ...]`` of all tokens: 0 for those that the module is not
    given.
    """
    running = False

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            nonlocal running
            own, found = subject.part_of(name), tensors_of(out)
            places = {} if running else _hidden(subject, name, args, kwargs)
            if not places or not found or found[0].dim() < 3:  # of two dimensions it may be pooled
                return
            rows = subject.as_rows(name, found[0])
            if rows is None:
                return
            kept = {name: None if name in _CACHES else value for name, value in kwargs.items()}

            def again(other: Tensor) -> Tensor:
                other = shared(other, subject.group)
                # One object for all arguments that were one: modules ask whether the query is the key.
                parts = {one.key: one.written(other) for one in places.values()}
                given = {place: parts[one.key] for place, one in places.items()}
                positional = [given.get(place, one) for place, one in enumerate(args)]
                named = {name: given.get(name, one) for name, one in kept.items()}
                made = tensors_of(module(*positional, **named))[0]
                return _spread([(made.transpose(0, 1) if rows[1] else made, own)], subject.shape[1])

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
    """An argument of a module that holds rows of tokens.

    Args:
        rows: ``[batch, length, ...]``.
        part: which tokens' they are.
        is_turned: whether the module is handed them as ``[length, batch, ...]``.
    """

    rows: Tensor
    part: slice
    is_turned: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        """The same for arguments that were one tensor."""
        return self.part.start, self.part.stop, self.is_turned

    def written(self, other: Tensor) -> Tensor:
        """Return other rows, of all tokens, as the module is handed its own."""
        own = other[:, self.part]
        return (own.transpose(0, 1) if self.is_turned else own).contiguous()


def _hidden(
    subject: Subject, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int | str, _Argument]:
    """The arguments that hold rows of the module's own text, and those that another text was made into.

    The first one is its own rows, and with it all that hold the same numbers, as in ``attention(x, x, x)``.
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
    """Rows of some tokens among those of all, where others are 0."""
    rows = list(rows)
    first, part = rows[0]
    if len(rows) == 1 and part == slice(0, length):
        return first
    out = first.new_zeros(len(first), length, *first.shape[2:])
    for one, part in rows:
        out[:, part] = one
    return out
