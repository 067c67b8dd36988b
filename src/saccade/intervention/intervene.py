"""intervene: change the attention of a model while it runs."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

import torch
from torch import Tensor, nn

from saccade.fusion.checkpoints import enter_when_recomputed
from saccade.integrations.capture_context import Listener, names_of
from saccade.integrations.cross_attention import Kind, kind_of_call
from saccade.integrations.forward_proxy import PATCH_LOCK, CapturedCall, ForwardProxy
from saccade.integrations.matrix_hooks import EDITORS, MakeMatrix
from saccade.integrations.other_packages import visible_functions
from saccade.integrations.redirect_mode import Site, run_redirected
from saccade.integrations.redirected_call import Call, Redirected, without_free_slots
from saccade.integrations.saccade_capture import holders_of
from saccade.integrations.tensor_masks import joined
from saccade.intervention.edits import Edit, Head, How, MaskEdit, OutputEdit, PatternEdit, checked_target, edited
from saccade.intervention.sweep import Sweep, measured, swept
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.recording.recording import Recording
from saccade.support.errors import kind, shown, type_error, unsupported, value_error
from saccade.support.validation import check_choice, check_type, is_integer, is_number

CALLED_AS = "intervene"  # the name in error messages


class intervene:  # noqa: N801  called like a function, as torch.no_grad is
    """A context that edits the attention of a model while it runs: ablate heads, cut edges, patch patterns.

    Edits apply to any attention that `saccade.record` records with its scores, under the same layer names: in torch's
    layers, in transformers models, in saccade's layers, and in code that calls torch's attention functions or writes
    attention as matmul, softmax and matmul. Layers without edits run unchanged. All edits end with the block.

    Several edits of a layer are applied in this order: masks are combined, patterns replace the matrix, and then the
    outputs of heads are changed in the order of the edits. Edits apply to every call, including calls with a cache and
    in training; gradients flow through them. A recording shows the matrices after masks and patterns.

    Args:
        model: any torch model; unchanged.

    Raises:
        ValueError, UnsupportedError: at the end of the block, if an edited layer did not run; when the model runs, if
            an edit does not fit a call, or if the attention of an edited layer cannot be changed.

    Cost: none for layers without edits, except that torch's encoder layers leave their fast path. An edited layer
    computes its attention once, plus the edited heads once for each distinct mask or pattern.

    Example:
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 5, 16)
        >>> with intervene(layer) as edit:
        ...     edit.scale("self_attn", 0, 0.0)
        ...     without_head = layer(x)
        >>> torch.allclose(without_head, layer(x))
        False
    """

    def __init__(self, model: nn.Module):
        check_type("model", model, nn.Module, "be a torch module")
        self._model = model
        self._edits: list[Edit] = []
        self._layers: dict[str, int] = {}
        self._names: dict[nn.Module, str] = {}
        self._rank = 0  # larger for interventions entered later
        self._stack: ExitStack | None = None
        self._counts_heads = False
        self._calls = _Calls(self)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers that have run attention within the block, in the order of their first calls."""
        return tuple(self._layers)

    def mask(self, layer: str | int, head: Head, rule: object) -> None:
        """Mask all pairs that ``rule`` does not allow, cutting their edges. A query left without keys gets output 0.

        Args:
            layer: name of a layer, with ``*`` for any characters; or its index, in the order in which layers first
                run.
            head: the index of a head, several indices, or None for all.
            rule: a mask, a bool tensor (True = may attend), or a function ``(b, h, q, kv) -> bool``; see
                `saccade.attention`.
        """
        if not (isinstance(rule, Mask | Tensor) or (callable(rule) and not isinstance(rule, type))):
            raise type_error("rule", "be a saccade mask, a bool tensor or a function (b, h, q, kv) -> bool", kind(rule))
        if isinstance(rule, Tensor) and rule.dtype != torch.bool:
            raise type_error("rule", "be bool if it is a tensor (True = may attend)", str(rule.dtype))
        self._add(MaskEdit(*checked_target(layer, head), mask=rule))

    def scale(self, layer: str | int, head: Head, factor: float | Tensor) -> None:
        """Multiply the output of heads by a factor; a factor of 0.0 removes them.

        Args:
            layer, head: see `mask`.
            factor: a number, or a tensor that broadcasts to ``[batch, heads, q_len, value_dim]``, where ``heads`` are
                the chosen heads only. It may require a gradient.
        """
        if not (is_number(factor) or isinstance(factor, Tensor)):
            raise type_error("factor", "be a number or a tensor", kind(factor))
        self._add(OutputEdit(*checked_target(layer, head), factor=factor))

    def ablate(self, layer: str | int, head: Head, how: How = "zero", *, seed: int = 0) -> None:
        """Remove the output of heads.

        Args:
            layer, head: see `mask`.
            how: "zero"; "mean": the mean over the batch, at each position; "resample": the output of another batch
                item.
            seed: selects the other batch item for "resample".
        """
        check_choice("how", how, ("zero", "mean", "resample"))
        if not is_integer(seed) or seed < 0:
            raise value_error("seed", "be an integer of 0 or more", shown(seed))
        self._add(OutputEdit(*checked_target(layer, head), how=how, seed=seed))

    def pattern(self, layer: str | int, head: Head, source: Recording | Matrix) -> None:
        """Replace the attention weights of heads with those of another run, without gradient; values do not change.

        Args:
            layer, head: see `mask`; with a recording, the name or index of a single layer.
            source: a matrix with the same number of heads; or a recording with queries and keys, from which the matrix
                of the same layer is used. The matrix has the batch size of the call, or 1. It may cover a longer
                sequence than one call, as is needed for calls with a cache; if its last rows are never used, there is a
                warning at the end of the block.
        """
        if isinstance(source, Recording):
            source = source[layer].matrix
        check_type("source", source, Matrix, "be a recording or a matrix")
        self._add(PatternEdit(*checked_target(layer, head), matrix=source))

    def freeze(self, recording: Recording, layers: Iterable[str] | None = None) -> None:
        """Freeze the patterns of recorded layers, so that only values change: apply `pattern` to all their heads.

        Args:
            recording: a recording with queries and keys.
            layers: names of the recorded layers; all of them when None.
        """
        check_type("recording", recording, Recording, "be a recording")
        for layer in recording if layers is None else layers:
            self.pattern(layer, None, recording)

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise unsupported("intervene", ["this context is already in use"], hint="create a new one")
        self._names, self._rank = names_of(self._model), next(_RANKS)
        self._stack = self._activated()
        return self

    def _activated(self) -> ExitStack:
        """Apply the edits from now on, until the returned stack is closed."""
        with ExitStack() as stack:
            listener: Any = Listener("", self)  # type: ignore[arg-type]  # the proxy only passes it on
            with PATCH_LOCK:
                for module in self._names:
                    if _may_run_attention(module):
                        proxy = ForwardProxy.at(module, _run)
                        proxy.add(listener)
                        stack.callback(proxy.remove, listener)
            for mechanism, holders in holders_of(self._names).items():
                hook = _Hook(self, holders)  # before the hooks of recordings
                stack.callback(mechanism.register_forward_hook(hook, prepend=True, with_kwargs=True).remove)
            stack.enter_context(visible_functions(self._model))
            EDITORS.append(_edited)
            stack.callback(EDITORS.remove, _edited)
            _ACTIVE.append(self)
            stack.callback(_ACTIVE.remove, self)
            return stack.pop_all()

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        assert self._stack is not None
        self._stack.close()
        self._stack = None
        unused = [edit for edit in self._edits if not edit.was_used]
        if exc_type is None and unused:
            ran = ", ".join(self._layers) or "none"
            raise value_error("layer", "be one whose attention ran", repr(unused[0].layer), hint=f"these ran: {ran}")
        if exc_type is None:
            self._warn_of_unused_rows()

    def _warn_of_unused_rows(self) -> None:
        """Warn if the calls have used only the first rows of a pattern."""
        for edit in self._edits:
            if isinstance(edit, PatternEdit) and edit.matrix is not None and edit.used_rows < edit.matrix.shape[2]:
                warnings.warn(
                    f"intervene: the pattern of layer {edit.layer!r} has {edit.matrix.shape[2]} rows, and the model "
                    f"used only the first {edit.used_rows}; unless generation ended early, record the pattern on an "
                    "input of the same length",
                    stacklevel=3,
                )
                return

    def _name(self, module: nn.Module, number: int) -> str:
        """Return the layer name for the attention call with index ``number`` in a module's forward pass."""
        return f"{self._names[module]}:{number}" if number else self._names[module]

    def _edits_of(self, name: str) -> list[Edit]:
        """Return the edits of a layer; the first call for a layer assigns the layer's index."""
        number = [*self._layers].index(name) if name in self._layers else len(self._layers)
        self._layers.setdefault(name, 0)
        return [
            edit
            for edit in self._edits
            if (fnmatchcase(name, edit.layer) if isinstance(edit.layer, str) else edit.layer == number)
        ]

    def _hold_in_checkpoints(self, module: nn.Module) -> None:
        """Make the backward pass apply the current edits when it recomputes a checkpoint that contains a module."""
        if not enter_when_recomputed(_Recomputed(self, tuple(self._edits))) and self._edits:
            reason = "hooks for saved tensors hide a checkpoint, which would recompute the attention without the edits"
            raise unsupported(self._names[module], [reason], hint="run the checkpoint outside of the hooks")

    def _add(self, edit: Edit) -> None:
        self._edits.append(edit)

    @staticmethod
    def sweep(
        model: nn.Module,
        measure: Callable[[], float | Tensor],
        *,
        layers: Iterable[str] | None = None,
        how: How = "zero",
    ) -> Sweep:
        """Ablate one head at a time, and measure the effect.

        Args:
            model: any torch model.
            measure: runs the model and returns a scalar, such as a loss or a logit difference.
            layers: names of layers, with ``*`` for any characters; all layers when None.
            how: see `ablate`.

        Returns:
            For each head, the measure without it, and its difference from the measure of the whole model.

        Cost: ``measure`` is called once, and once for each head.
        """
        check_type("model", model, nn.Module, "be a torch module")
        check_choice("how", how, ("zero", "mean", "resample"))
        unedited = intervene(model)
        unedited._counts_heads = True
        with torch.no_grad(), unedited:
            baseline = measured(measure)
        chosen = None if layers is None else tuple(layers)
        heads = [
            (name, head)
            for name, count in unedited._layers.items()
            if chosen is None or any(fnmatchcase(name, pattern) for pattern in chosen)
            for head in range(count)
        ]
        if not heads:
            ran = ", ".join(unedited.layers) or "none"
            raise value_error("layers", "name layers whose attention runs", shown(chosen), hint=f"these ran: {ran}")

        def without(layer: str, head: int) -> float:
            with torch.no_grad(), intervene(model) as edit:
                edit.ablate(layer, head, how)
                return measured(measure)

        return swept(baseline, heads, without)


@dataclass(frozen=True)
class _Recomputed:
    """A context for recomputing a checkpoint; it reapplies the edits that were active in the forward pass."""

    intervention: intervene
    edits: tuple[Edit, ...]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        intervention, added = self.intervention, self.intervention._edits
        with nullcontext() if intervention in _ACTIVE else intervention._activated():
            intervention._edits = [*self.edits]
            try:
                yield
            finally:
                intervention._edits = added


_ACTIVE: list[intervene] = []
_RANKS = itertools.count()


def _active(module: nn.Module) -> list[intervene]:
    """Return the active interventions whose models contain a module, in the order in which they were entered."""
    found = [intervention for intervention in _ACTIVE if module in intervention._names]
    return sorted(found, key=lambda intervention: intervention._rank)


def _is_most_recent(intervention: intervene, module: nn.Module) -> bool:
    """Return whether an intervention is the most recently entered of a module's active interventions."""
    return _active(module)[-1:] == [intervention]


def _edits_of(module: nn.Module, number: int) -> list[Edit]:
    """Return all active interventions' edits to the attention call with index ``number`` in a module's forward pass."""
    active = _active(module)
    for intervention in active:
        intervention._hold_in_checkpoints(module)
    return [edit for intervention in active for edit in intervention._edits_of(intervention._name(module, number))]


def _edited(module: nn.Module, make: MakeMatrix, matrix: Matrix) -> Matrix:
    """Return the edited matrix of a module that runs on saccade."""
    for intervention in _active(module):
        intervention._layers[intervention._name(module, 0)] = matrix.shape[1]
    edits = _edits_of(module, 0)
    return edited(edits, make, matrix) if edits else matrix


def _may_run_attention(module: nn.Module) -> bool:
    """Return whether attention may run within a module's forward pass, so that the module must be observed."""
    if isinstance(module, torch.jit.ScriptModule | Mechanism) or inspect.isbuiltin(module.forward):
        return False
    is_of_torch = type(module).__module__.startswith("torch.")
    return not is_of_torch or isinstance(module, nn.MultiheadAttention) or any(True for _ in module.children())


def _run(call: CapturedCall) -> Any:
    """Run a module, and let each intervention handle the attention calls in the module's own code."""

    def run(listeners: Sequence[Listener]) -> Any:
        if not listeners:
            return call.run()
        intervention: Any = listeners[0].capture
        site = Site(intervention._names[call.module], call.module, call.args, call.kwargs)
        return run_redirected(intervention._calls, site, lambda *_, **__: run(listeners[1:]))

    return run(call.listeners)


class _Calls:
    """A handler that edits the attention calls that a model makes in its own code."""

    def __init__(self, intervention: intervene):
        self._intervention = intervention

    @property
    def rank(self) -> int:
        """The priority of the handler; later interventions receive calls before earlier ones but after replacements."""
        return self._intervention._rank

    def attend(self, site: Site, call: Call) -> Redirected | None:
        """Evaluate an attention call in a module's own code if the call has edits; otherwise return None."""
        if not _is_most_recent(self._intervention, site.module):
            return None  # the most recent intervention applies all edits
        number, site.calls = site.calls, site.calls + 1
        edits = _edits_of(site.module, number)
        if not edits and not self._intervention._counts_heads:
            return None
        if kind_of_call(site, call.q_len, call.value.shape[2]) is not Kind.CROSS:
            call = without_free_slots(call)
        plain = call.matrix(None)
        self._intervention._layers[self._intervention._name(site.module, number)] = plain.shape[1]
        if not edits:
            return None
        matrix = edited(edits, call.matrix, plain)
        return Redirected(matrix.matmul(call.value, dropout_p=call.dropout_p), matrix, call.value, is_changed=True)

    def leave(self, site: Site, reason: str) -> None:
        """Raise an error if the layer has edits, because attention that stays in the model's code cannot be edited."""
        number, site.calls = site.calls, site.calls + 1
        edits = _edits_of(site.module, number)
        for edit in edits:
            edit.was_used = True  # an error is raised, so the edit is not reported as unused
        if edits:
            raise unsupported(f"{site.name}, a {type(site.module).__name__}", [reason])

    def finish(self, site: Site) -> None:
        """Do nothing, because unused edits are reported at the end of the block."""


class _Hook:
    """A forward hook on a mechanism that replaces its matrix with the edited one."""

    def __init__(self, intervention: intervene, holders: list[nn.Module]):
        self._intervention, self._holders = intervention, holders

    def __call__(self, mechanism: Mechanism, args: Any, kwargs: Any, matrix: Matrix) -> Matrix:
        module = self._holders[0] if len(self._holders) == 1 else mechanism
        if not _is_most_recent(self._intervention, module):
            return matrix  # the most recent intervention applies all edits

        def make(rule: Mask | None) -> Matrix:
            both = joined(as_mask(kwargs.get("mask"), matrix.shape), rule)
            made: Matrix = mechanism.forward(*args, **{**kwargs, "mask": both})
            return made

        return _edited(module, make, matrix)
