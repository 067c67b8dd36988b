"""record(): record the attention of a model while it runs unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from torch import nn

from saccade.integrations.capture_all import capture_all
from saccade.matrix import Matrix
from saccade.recording.collector import Collector, KeepOptions, Selection
from saccade.recording.recording import Recording
from saccade.statistics import Pooled, Statistic, TopK
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_type

CALLED_AS = "record"  # in errors

_MAX_SHOWN = 8
_LIBRARY_HINTS = {
    "timm": "call timm.layers.set_fused_attn(True, experimental=True) before creating the model",
    "transformers": 'model.set_attn_implementation("sdpa") if the model supports it',
}

Keep = Literal["statistics", "topk", "pooled", "qk", "gradients"] | Statistic[Any, Any]
"""The data to store for each call: a statistic, or the name of a group of statistics or tensors."""

_STATISTICS: dict[str, tuple[Statistic[Any, Any], ...]] = {
    "statistics": (),
    "topk": (TopK(8),),
    "pooled": (Pooled(64),),
    "qk": (),
    "gradients": (),
}


class UnrecordedLayersWarning(UserWarning):
    """A warning that some attention layers ran but could not be recorded, although other layers were recorded.

    `Recording.not_recorded` names the layers that could not be recorded.
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
    """Record the attention of a model while it runs on its own kernels, with bitwise identical outputs.

    Within the ``with`` block, every call to these attention layers is recorded:

    - layers of transformers models, with any attention implementation;
    - ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``, in training, in evaluation and on the fast path;
    - modules that call ``torch.nn.functional.scaled_dot_product_attention`` (as in timm),
      ``multi_head_attention_forward`` or `saccade.attention`;
    - saccade's own layers, and those inserted by `saccade.replace_attention`.

    The recorded matrix has the mask, mechanism and bias that were used. Weights are those of the softmax, before
    dropout. Recurrent layers of transformers (gated delta rules, Kimi Delta Attention, Mamba-2, lightning attention)
    are recorded as the matrices that they are equivalent to. ``output_attentions`` is never set, and no n × n matrix is
    built. An `UnrecordedLayersWarning` and ``recording.not_recorded`` list modules that ran without being recorded
    although they multiply the result of a softmax, have "attention" in their class name, or are such recurrent layers.

    A call is recorded if it begins and ends within the block, in any thread. It continues the layer's last call in the
    same thread if it adds keys to that call's keys. Several recordings of a model may overlap in any way, and each of
    them records all calls.

    Args:
        model: any torch model.
        layers: the attention layers to record: indices, in the order of their first calls, or names of modules, where
            ``*`` matches anything; all layers when None.
        heads: indices of the heads to record; all heads when None.
        keep: the data to store for each call: statistics from `saccade.statistics`, or names. "statistics": all
            statistics of a summary (entropy, masses, distance, attention received, …) with its uniform baseline; if
            rows are not distributions, only those defined for any weights. "topk": the 8 strongest keys of each query.
            "pooled": a map of 64 × 64 cells. "qk": queries and keys, to compute any statistics later. "gradients": the
            gradients with respect to the weights of calls without dropout, in ``recording.gradients`` after the
            backward pass. An empty tuple stores nothing, for use with a callback.
        callback: called as ``callback(name, matrix)`` after each call to a layer. The matrix is lazy and refers to the
            tensors of the model, so use it immediately or store "qk".

    Returns:
        A context manager that yields a `Recording`.

    Raises:
        TypeError, ValueError: an argument is invalid; raised before the model runs.
        UnsupportedError: at the end, if no attention layer was recorded, or a selected one was not; when the model
            runs, if a layer computes an unsupported matrix, or a recurrent layer continues from an unrecorded state.

    Cost: passes over the matrix for the statistics (see `saccade.Matrix.summary`, `saccade.Matrix.compute`) and
    O(length) memory; for "qk", a copy of O(length · width), the better choice for long generations.
    ``nn.MultiheadAttention`` projects queries and keys a second time.

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
    options = _keep_options(keep)
    if not (any(options) or callback):
        raise value_error("keep", "contain something if there is no callback", "nothing")
    selection = Selection(layers, heads)
    return _recording(model, Collector(options, selection, callback), selection)


@contextmanager
def _recording(model: nn.Module, collector: Collector, selection: Selection) -> Iterator[Recording]:
    with capture_all(model, collector.on_call) as capture:
        try:
            yield Recording(collector.runs, capture.not_recorded, selection.heads)
        finally:
            collector.end()
    not_recorded = {name: kind for name, kind in capture.not_recorded.items() if selection.may_select(name)}
    _check_recorded(model, selection, not_recorded)
    if not_recorded:
        # Skip the frames of contextlib, to point at the `with` statement.
        warnings.warn(f"record: {_describe(not_recorded)}.", UnrecordedLayersWarning, stacklevel=3)


def _describe(not_recorded: dict[str, str]) -> str:
    shown = [f"{name} ({kind})" for name, kind in [*not_recorded.items()][:_MAX_SHOWN]]
    more = f" and {len(not_recorded) - _MAX_SHOWN} more" if len(not_recorded) > _MAX_SHOWN else ""
    what = "ran but could not be recorded: such a layer computes its weights with its own operations, or has none"
    return f"{', '.join(shown)}{more} {what}"


def _check_recorded(model: nn.Module, selection: Selection, not_recorded: dict[str, str]) -> None:
    """Raise an error with the likely reason if no layer, or not every selected layer, was recorded."""
    name = type(model).__name__
    if not selection.called:
        reason = "no attention layer was recorded: none ran, or they compute their weights with their own operations"
        reason = _describe(not_recorded) if not_recorded else reason
        raise unsupported(name, [reason], hint=_hint(model))
    if selection.unused:
        reason = f"{', '.join(map(str, selection.unused))} was not recorded; {', '.join(selection.called)} were"
        raise unsupported(name, [reason], hint="layers= takes numbers or names of recorded layers")


def _hint(model: nn.Module) -> str:
    """Return a hint for an error message: how to make the model compute its attention in a recordable way."""
    libraries = {type(module).__module__.partition(".")[0] for module in model.modules()}
    hints = [hint for library, hint in _LIBRARY_HINTS.items() if library in libraries]
    return "; ".join([*hints, "calls of torch.nn.functional.scaled_dot_product_attention can be recorded"])


def _keep_options(keep: object) -> KeepOptions:
    requested = [keep] if isinstance(keep, str | Statistic) else list(keep) if isinstance(keep, Iterable) else [keep]
    statistics: list[Statistic[Any, Any]] = []
    for item in requested:
        if isinstance(item, str) and item in _STATISTICS:
            added = _STATISTICS[item]
        elif isinstance(item, Statistic):
            added = (item,)
        else:
            names = ", ".join(f'"{name}"' for name in _STATISTICS)
            got = item.__name__ if isinstance(item, type) else repr(item)
            rule = f"be statistics from saccade.statistics, or some of {names}"
            raise type_error("keep", rule, got, hint="pass instances: keep=[Entropy()]")
        statistics += [statistic for statistic in added if statistic not in statistics]
    return KeepOptions(tuple(statistics), "statistics" in requested, "qk" in requested, "gradients" in requested)
