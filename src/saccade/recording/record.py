"""record(): run a model as it is, and keep what it attends to."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from torch import nn

from saccade.integrations.capture_all import tapped
from saccade.matrix import Matrix
from saccade.recording.collector import Kept, Recorder
from saccade.recording.layer_selection import Selection
from saccade.recording.recording import Recording
from saccade.statistics import Pooled, Statistic, TopK
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_type

CALLED_AS = "record"  # in errors

_SHOWN = 8
_WAYS_OUT = {
    "timm": "timm.layers.set_fused_attn(True, experimental=True) before the model is made",
    "transformers": 'model.set_attn_implementation("sdpa") if the model has it',
}

Keep = Literal["statistics", "topk", "pooled", "qk"] | Statistic[Any, Any]
"""What is kept of a call: a question's answer, some by name, or queries and keys."""

_NAMED: dict[str, tuple[Statistic[Any, Any], ...]] = {
    "statistics": (),
    "topk": (TopK(8),),
    "pooled": (Pooled(64),),
    "qk": (),
}


class UnheardLayersWarning(UserWarning):
    """Layers that attend ran and could not be recorded, while others could.

    `Recording.unheard` names them.
    """


@argument_hints({})
def record(
    model: nn.Module,
    *,
    layers: int | str | Iterable[int | str] | None = None,
    heads: int | Iterable[int] | None = None,
    keep: Keep | Iterable[Keep] = "statistics",
    callback: Callable[[str, Matrix], None] | None = None,
) -> AbstractContextManager[Recording]:
    """Keep what a model attends to while it runs, on its own kernels, with the same outputs to the bit.

    Within the ``with`` block every call of an attention layer is heard: of transformers models, whichever attention
    implementation they are set to; of ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``, in training, evaluation
    and on the fast path; of modules that call ``torch.nn.functional.scaled_dot_product_attention`` themselves, as
    timm's do, ``multi_head_attention_forward`` or `saccade.attention`; and of saccade's own, and what
    `saccade.replace_attention` put in:
    with the mask, mechanism and terms that ran. Weights are those of the softmax, before dropout; recurrent layers of
    transformers (gated delta rules, Kimi Delta Attention, Mamba-2, lightning attention) are heard as the matrices that
    they are. ``output_attentions`` is never asked for, and no n × n matrix is built. A module that multiplies the
    result of a softmax, or whose class is called attention or is such a recurrence, and which ran without being heard,
    is named in an `UnheardLayersWarning` and in ``recording.unheard``.

    A call is recorded if it begins and ends within the block, in whichever thread it runs; it continues the last call
    of its thread if it adds keys to it. Several recordings of one model may overlap in any way, and each hears all of
    it.

    Args:
        model: any torch model.
        layers: which attention layers: numbers, in the order in which they speak, or names of modules, in which ``*``
            stands for anything. All when None.
        heads: which heads, by number; all when None.
        keep: what of each call: questions of `saccade.statistics`, or names. "statistics": all of a summary (entropy,
            masses, distance, attention received, …) with its uniform baseline; of rows that are no distributions, what
            can be said of any weights. "topk": the 8 strongest keys of each query. "pooled": a map of 64 × 64 cells.
            "qk": queries and keys, for questions that come later. An empty tuple keeps nothing, for a callback.
        callback: called as ``callback(name, matrix)`` after each call of a layer, with the lazy matrix, whose tensors
            are those of the model: ask now, or keep "qk".

    Returns:
        A context manager that gives a `Recording`.

    Raises:
        TypeError, ValueError: arguments that are none of these; before the model runs.
        UnsupportedError: at the end, if the model ran and no attention layer was heard, or none of those named; where a
            layer does something that changes its matrix in a way that is not known; and where a recurrent layer goes on
            from a state that no recorded call has left.

    Cost: sweeps over the weights for the statistics (see `saccade.Matrix.summary`, `saccade.Matrix.compute`) and
    O(length) memory; for "qk" a copy, O(length · width), which is the better choice for long generations.
    ``nn.MultiheadAttention`` projects queries and keys once more.

    Example:
        >>> from torch import nn
        >>> from saccade.statistics import Entropy
        >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
        >>> with record(layer) as recording:
        ...     out = layer(torch.zeros(1, 5, 16))
        >>> recording.layers
        ('self_attn',)
        >>> recording["self_attn"].compute(Entropy())[0].shape
        torch.Size([1, 2, 5])
    """
    check_type("model", model, nn.Module, "be a torch module")
    if callback is not None and not callable(callback):
        raise type_error("callback", "be a function (name, matrix), or None", type(callback).__name__)
    kept = _kept(keep)
    if not (any(kept) or callback):
        raise value_error("keep", "name something where there is no callback", "nothing")
    selection = Selection(layers, heads)
    return _recording(model, Recorder(kept, selection, callback), selection)


@contextmanager
def _recording(model: nn.Module, recorder: Recorder, selection: Selection) -> Iterator[Recording]:
    with tapped(model, recorder.hear) as valve:
        try:
            yield Recording(recorder.runs, valve.unheard)
        finally:
            recorder.end()
    unheard = {name: kind for name, kind in valve.unheard.items() if selection.may_mean(name)}
    _check_heard(model, selection, unheard)
    if unheard:
        # Here, contextlib and the `with` statement stand above one another.
        warnings.warn(f"record: {_said_of(unheard)}.", UnheardLayersWarning, stacklevel=3)


def _said_of(unheard: dict[str, str]) -> str:
    shown = [f"{name} ({kind})" for name, kind in [*unheard.items()][:_SHOWN]]
    more = f" and {len(unheard) - _SHOWN} more" if len(unheard) > _SHOWN else ""
    what = "ran and could not be heard: such a layer computes its weights in operations of its own, or has none"
    return f"{', '.join(shown)}{more} {what}"


def _check_heard(model: nn.Module, selection: Selection, unheard: dict[str, str]) -> None:
    """Raise where nothing was heard, or not what was asked for, and say what could be wrong."""
    name = type(model).__name__
    if not selection.heard:
        reason = (
            "no call of an attention layer was heard: it did not run, or computes its weights in operations of its own"
        )
        reason = _said_of(unheard) if unheard else reason
        raise unsupported(name, [reason], hint=_way_out(model))
    if selection.unused:
        reason = f"{', '.join(map(str, selection.unused))} was not heard; {', '.join(selection.heard)} were"
        raise unsupported(name, [reason], hint="layers= takes numbers and names of these")


def _way_out(model: nn.Module) -> str:
    """Say how a model of this library comes to call attention that can be recorded."""
    libraries = {type(module).__module__.partition(".")[0] for module in model.modules()}
    ways = [way for library, way in _WAYS_OUT.items() if library in libraries]
    return "; ".join([*ways, "any module can call torch.nn.functional.scaled_dot_product_attention"])


def _kept(keep: object) -> Kept:
    given = [keep] if isinstance(keep, str | Statistic) else list(keep) if isinstance(keep, Iterable) else [keep]
    statistics: list[Statistic[Any, Any]] = []
    for one in given:
        if isinstance(one, str) and one in _NAMED:
            added = _NAMED[one]
        elif isinstance(one, Statistic):
            added = (one,)
        else:
            names = ", ".join(f'"{name}"' for name in _NAMED)
            got = one.__name__ if isinstance(one, type) else repr(one)
            rule = f"be questions of saccade.statistics, or of {names}"
            raise type_error("keep", rule, got, hint="give instances: keep=[Entropy()]")
        statistics += [statistic for statistic in added if statistic not in statistics]
    return Kept(tuple(statistics), "statistics" in given, "qk" in given)
