"""ReplacementPlan: the mask and the mechanism of each attention module of a model, and how the module runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import ClassVar, NamedTuple, overload

from torch import nn

from saccade.integrations.cross_attention import Kind, is_named_cross, kind_of_call
from saccade.integrations.matrix_hooks import EDITORS, edited_matrix
from saccade.integrations.redirect_mode import Site
from saccade.integrations.redirected_call import Call, Redirected, without_free_slots
from saccade.integrations.tensor_masks import joined
from saccade.masks import Mask
from saccade.matrix import AttentionMatrix, Matrix
from saccade.mechanisms import Mechanism
from saccade.support.errors import shown, type_error, unsupported, value_error

CALLED_AS = "replace_attention"  # the name in error messages

MODULE, CALLS, LEFT = "module", "calls", "left alone"


class Replaced(NamedTuple):
    """One attention module of a model, and how it runs after replacement.

    Attributes:
        name: name of the module in the model.
        before, after: descriptions of the attention before and after replacement.
        how: "module" if saccade replaces the whole module; "calls" if the module runs its own code and only its
            attention calls are replaced; "left alone: reason" if nothing is replaced.
    """

    name: str
    before: str
    after: str
    how: str = MODULE


class Replacements(Sequence[Replaced]):
    """The attention modules of a model, in module order, and how each of them runs.

    Attention in a module's own code is detected when it runs, so it is listed only after the model's first run.
    """

    def __init__(self, replaced: Mapping[str, Replaced], order: Mapping[str, int]):
        self._replaced, self._order = replaced, order

    def _list(self) -> list[Replaced]:
        return sorted(self._replaced.values(), key=lambda item: self._order.get(item.name, len(self._order)))

    def __len__(self) -> int:
        return len(self._replaced)

    @overload
    def __getitem__(self, index: int) -> Replaced: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Replaced]: ...

    def __getitem__(self, index: int | slice) -> Replaced | Sequence[Replaced]:
        return self._list()[index]

    def __repr__(self) -> str:
        rows = [(item.name or "(the model)", item.before, item.after, item.how) for item in self._list()]
        if not rows:
            return "Replacements: none so far; attention in a module's own code is found when it runs"
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
            for row in rows
        )


@dataclass(frozen=True)
class Rules:
    """The mask of each attention module in a model.

    Args:
        mask: one pattern for all self-attention; or a mapping from name patterns to masks or None. The first match
            applies.
        cross: name patterns of cross-attention modules; None to infer them from names, arguments and lengths.
    """

    mask: Mask | Mapping[str, Mask | None] | None
    cross: tuple[str, ...] | None = None

    @property
    def is_by_name(self) -> bool:
        """Whether masks are given by module name."""
        return isinstance(self.mask, Mapping)

    def named(self, name: str) -> Mask | None:
        """Return the mask of the first name pattern that matches a module, or None."""
        assert isinstance(self.mask, Mapping)
        return next((rule for pattern, rule in self.mask.items() if is_within(name, pattern)), None)

    def is_cross(self, name: str, module: nn.Module) -> bool | None:
        """Return whether a module is cross-attention, or None if that depends on its calls."""
        if self.cross is not None:
            return any(is_within(name, pattern) for pattern in self.cross)
        return True if is_named_cross(name, type(module).__name__) else None

    def of_module(self, name: str, module: nn.Module) -> Mask | None:
        """Return the mask for all calls of a module, using only names to decide whether it is cross-attention."""
        if isinstance(self.mask, Mapping):
            return self.named(name)
        return None if self.is_cross(name, module) else self.mask


@dataclass
class ReplacementPlan:
    """A handler that evaluates a model's attention calls with saccade.

    Args:
        rules: the masks.
        mechanism: computes the matrices; exact softmax when None.
        left: names of the modules whose attention is not replaced.
        partial: whether attention that cannot be redirected may stay in the model's own code.
        order: index of each module in the model, by name.
        replaced: the attention modules detected so far, by name.
    """

    rules: Rules
    mechanism: Mechanism | None
    left: frozenset[str]
    partial: bool
    order: dict[str, int]
    rank: ClassVar[float] = math.inf
    replaced: dict[str, Replaced] = field(default_factory=dict)
    _self_attention: set[str] = field(default_factory=set)
    _has_run: bool = False

    def attend(self, site: Site, call: Call) -> Redirected | None:
        """Evaluate a running module's attention call, or return None to leave it to the module's own code."""
        if site.name in self.left:
            self._note(site, "its own code", f"{LEFT}: named in leave=")
            return None
        rule = self._mask_of(site, call)
        is_cross = kind_of_call(site, call.q_len, call.value.shape[2]) is Kind.CROSS
        call = call if rule is None or is_cross else without_free_slots(call)

        def make(more: Mask | None) -> Matrix:
            exact = call.matrix(joined(rule, more))
            return exact if self.mechanism is None else _by_mechanism(self.mechanism, site, exact)

        matrix = edited_matrix(site.module, make)
        out = matrix.matmul(call.value, dropout_p=call.dropout_p)
        self._note(site, "Softmax" if self.mechanism is None else type(self.mechanism).__name__, CALLS)
        is_changed = rule is not None or self.mechanism is not None or bool(EDITORS)
        return Redirected(out, matrix, call.value, is_changed)

    def leave(self, site: Site, reason: str) -> None:
        """Record that the module's own code computes its attention.

        Raises:
            UnsupportedError: ``partial`` is False, so all attention must be replaced.
        """
        if site.name in self.left:
            return
        if not self.partial:
            name = site.name or "the model"
            hint = f"partial=True, or leave=[{site.name!r}], keeps it unchanged" if site.name else "partial=True"
            raise unsupported(f"{name} ({type(site.module).__name__})", [reason], hint=hint)
        self._note(site, "its own code", f"{LEFT}: {reason}")

    def finish(self, site: Site) -> None:
        """Check that the model's first run used attention wherever a mask was given.

        Raises:
            UnsupportedError: no attention ran at all, or none in the modules that match one of the name patterns.
        """
        if site.name or self._has_run:
            return
        self._has_run = True
        reasons = [] if self.replaced else ["no attention ran in it"]
        patterns = self.rules.mask if isinstance(self.rules.mask, Mapping) else {}
        idle = [pattern for pattern in patterns if not any(is_within(name, pattern) for name in self.replaced)]
        if self.replaced and idle:
            attentions = ", ".join(self.replaced)
            reasons.append(f"no attention ran in modules named {', '.join(map(repr, idle))}; it ran in {attentions}")
        if reasons:
            raise unsupported(type(site.module).__name__, reasons)

    def _note(self, site: Site, after: str, how: str) -> None:
        known = self.replaced.get(site.name)
        if known is not None and known.how != how:
            how = "; ".join(dict.fromkeys([*known.how.split("; "), how]))
        self.replaced[site.name] = Replaced(site.name, type(site.module).__name__, after, how)

    def _mask_of(self, site: Site, call: Call) -> Mask | None:
        """Return the mask to combine with the mask of a call; None for no mask.

        Raises:
            UnsupportedError: one mask was given for all self-attention, and the call may be self- or cross-attention.
        """
        rules = self.rules
        if rules.mask is None:
            return None
        if rules.is_by_name:
            return rules.named(site.name)
        assert isinstance(rules.mask, Mask)
        is_cross = rules.is_cross(site.name, site.module)
        if is_cross is not None:
            return None if is_cross else rules.mask
        q_len, kv_len = call.q_len, call.value.shape[2]
        kind = kind_of_call(site, q_len, kv_len)
        if kind is Kind.SELF:
            self._self_attention.add(site.name)
        elif kind is Kind.UNKNOWN and site.name in self._self_attention:  # a later call with cached keys
            kind = Kind.SELF
        if kind is Kind.UNKNOWN:
            reason = (
                f"{site.name or 'the model'} may be self-attention or cross-attention: {q_len} queries, {kv_len} keys"
            )
            hint = f'mask={{"{site.name}": rule}} names the modules to mask; cross_attention=[names] names the others'
            raise unsupported(f"mask={rules.mask}", [reason], hint=hint)
        return rules.mask if kind is Kind.SELF else None


def _by_mechanism(mechanism: Mechanism, site: Site, matrix: AttentionMatrix) -> Matrix:
    """Return the matrix that a mechanism computes from the inputs of an exact attention matrix.

    Raises:
        UnsupportedError: the mechanism has parameters, or does not support this call.
    """
    inputs = matrix.inputs
    _, _, q_len, kv_len = inputs.shape
    reasons = [*mechanism.reasons(inputs.rule)]
    if [*mechanism.parameters()]:
        reasons.append(f"it has parameters, but attention calls of {site.name or 'the model'} cannot store them")
    if inputs.bias is not None or inputs.softcap is not None:
        reasons.append(f"{site.name or 'the model'} adds a bias to its scores or caps them")
    if q_len != kv_len and inputs.origin != (kv_len - q_len, 0):
        reasons.append(f"{site.name or 'the model'} aligns its {q_len} queries with the first of {kv_len} keys")
    if reasons:
        raise unsupported(type(mechanism).__name__, reasons, hint="mechanism=None is exact attention")
    usual = inputs.query.shape[3] ** -0.5
    query = inputs.query if inputs.scale == usual else inputs.query * (inputs.scale / usual)
    mechanism.to(query.device)
    result: Matrix = mechanism(query, inputs.key, mask=inputs.rule)
    return result


def checked_rules(mask: object, cross_attention: object, names: Sequence[str]) -> Rules:
    """Validate the ``mask`` and ``cross_attention`` arguments of `replace_attention`, and return them as `Rules`.

    Args:
        mask: a mask, a mapping from name patterns to masks or None, or None.
        cross_attention: name patterns, or None.
        names: the names of the model's modules.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or a pattern matches no name.
    """
    if isinstance(mask, Mapping):
        for pattern, rule in mask.items():
            if not isinstance(pattern, str) or not isinstance(rule, Mask | None):
                shown_pair = f"{shown(pattern)}: {shown(rule)}"
                raise type_error("mask", "map names of modules to saccade masks or None", shown_pair)
        check_names("mask", [*mask], names)
        if cross_attention is not None:
            hint = "a mapping names each attention that gets a mask"
            raise value_error("cross_attention", "be None if mask is a mapping", shown(cross_attention), hint=hint)
        return Rules(dict(mask))
    if not isinstance(mask, Mask | None):
        hint = "pass a tensor mask to each call instead"
        raise type_error("mask", "be a saccade mask, a mapping from names to masks, or None", shown(mask), hint=hint)
    if cross_attention is None:
        return Rules(mask)
    rule = "be a list of names, or None"
    if isinstance(cross_attention, str) or not isinstance(cross_attention, Sequence | set | frozenset):
        raise type_error("cross_attention", rule, shown(cross_attention), hint="[name]")
    check_names("cross_attention", [*cross_attention], names)
    return Rules(mask, tuple(cross_attention))


def is_within(name: str, pattern: str) -> bool:
    """Return whether a pattern matches the name of a module or of any enclosing module."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:number]), pattern) for number in range(1, len(parts) + 1))


def check_names(argument: str, patterns: Sequence[object], names: Sequence[str]) -> None:
    """Raise an error unless each pattern is a str that matches at least one module name."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise type_error(argument, "contain module names", shown(pattern))
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = "names are those of model.named_modules(), which lists a shared module once"
            raise value_error(argument, "contain names of modules of the model", repr(pattern), hint=hint)
