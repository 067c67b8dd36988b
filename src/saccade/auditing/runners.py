"""Which runner knows a model."""

from __future__ import annotations

from torch import nn

from saccade.auditing.runner import Outputs, PlainRunner, Runner
from saccade.auditing.saccade_runner import SaccadeRunner
from saccade.auditing.transformers_runner import TransformersRunner
from saccade.models import Decoder, Encoder
from saccade.support.errors import kind, type_error


def runner_of(model: object, outputs: Outputs | None = None) -> Runner:
    """The runner that knows a model; a `Runner` is its own.

    Raises:
        TypeError: neither a module nor a runner.
    """
    if isinstance(model, Runner):
        return model
    if isinstance(model, Decoder | Encoder):
        return SaccadeRunner(model, outputs)
    if isinstance(model, nn.Module):
        ours = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
        return (TransformersRunner if ours else PlainRunner)(model, outputs)
    raise type_error("model", "be a torch.nn.Module or a saccade.auditing Runner", kind(model))
