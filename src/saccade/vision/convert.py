"""Convert the state dicts of vision modules to and from timm: names and shapes change, values do not."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type
from saccade.vision.cbam_and_bam import CBAM
from saccade.vision.gates import ECA, ChannelAttention, SpatialAttention
from saccade.vision.non_local import NonLocal

# Our names of submodules, mapped to timm's names.
_CHANNEL = {"reduce": "fc1", "expand": "fc2"}
_SPATIAL = {"conv": "conv.conv", "norm": "conv.bn"}
_PARTS: dict[type[nn.Module], dict[str, str]] = {
    ChannelAttention: _CHANNEL,
    ECA: {"conv": "conv"},
    SpatialAttention: _SPATIAL,
    NonLocal: {"query": "t", "key": "p", "value": "g", "output": "z", "norm": "norm"},
    CBAM: {f"channel.{ours}": f"channel.{theirs}" for ours, theirs in _CHANNEL.items()}
    | {f"spatial.{ours}": f"spatial.{theirs}" for ours, theirs in _SPATIAL.items()},
}


def to_timm(module: nn.Module) -> dict[str, Tensor]:
    """Convert a vision module to a state dict that makes its timm counterpart give equal outputs.

    ================================================ ====================================================
    ``ChannelAttention(pooling=("average",))``       ``SEModule``, which is ``SqueezeExcite``
    ``ChannelAttention(pooling=("average", "max"))`` ``ChannelAttn`` of ``timm.layers.cbam``
    ``ECA``                                          ``EcaModule`` with its ``kernel_size``
    ``SpatialAttention``                             ``SpatialAttn`` of ``timm.layers.cbam``
    ``CBAM``                                         ``CbamModule``
    ``NonLocal(kind="embedded")``                    ``NonLocalAttn``; ``use_scale=False`` for scale 1.0
    ================================================ ====================================================

    A state dict contains parameters, but no settings: build timm's layer with matching ``rd_channels`` and kernel size,
    and with ``mlp_bias`` (``bias`` in ``SEModule``) if our layer has ``projection_bias``.

    Args:
        module: one of the modules in the left column.

    Raises:
        TypeError: the module has no counterpart in timm.
        UnsupportedError: the module uses a setting that timm's counterpart lacks; every reason is listed.

    Example:
        >>> from saccade.vision import ChannelAttention
        >>> {name: list(x.shape) for name, x in to_timm(ChannelAttention(8, ratio=4)).items()}
        {'fc1.weight': [2, 8, 1, 1], 'fc1.bias': [2], 'fc2.weight': [8, 2, 1, 1], 'fc2.bias': [8]}
    """
    names, state = _names(module), module.state_dict()
    return {names[name]: x[:, :, None, None] if x.dim() == 2 else x for name, x in state.items()}


def from_timm(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a timm layer's state dict to one that makes our vision module give equal outputs; see `to_timm`.

    To load it, call ``module.load_state_dict(from_timm(module, theirs.state_dict()))``.

    Args:
        module: our module, which provides names and shapes and is not modified.
        state: the state dict of timm's counterpart.

    Raises:
        TypeError: the module has no counterpart in timm, or the state is not a mapping.
        UnsupportedError: the module uses a setting that timm's counterpart lacks.
        ValueError: names or shapes do not match the module.
    """
    names = _names(module)
    check_type("state", state, Mapping, "be a state dict")
    theirs = set(names.values())
    if theirs != set(state):
        facts = [f"lacks {sorted(theirs - set(state))}", f"has {sorted(set(state) - theirs)}"]
        rule = f"have the names of timm's counterpart of {type(module).__name__}"
        hint = "projection_bias and norm determine the parameters"
        raise value_error("state", rule, "other names", facts=facts, hint=hint)
    for name, x in module.state_dict().items():
        shape, expected = list(state[names[name]].shape), [*x.shape, 1, 1] if x.dim() == 2 else [*x.shape]
        if shape != expected:
            raise value_error(names[name], f"have shape {expected}, like {name} of the module", shape)
    return {name: state[names[name]].reshape(x.shape) for name, x in module.state_dict().items()}


def _names(module: nn.Module) -> dict[str, str]:
    """Return timm's names for the parameters of our vision module.

    Raises:
        TypeError, UnsupportedError: timm has no counterpart.
    """
    rule = "be a ChannelAttention, ECA, SpatialAttention, CBAM or NonLocal"
    check_type("module", module, tuple(_PARTS), rule)
    parts = next(parts for kind, parts in _PARTS.items() if isinstance(module, kind))
    reasons, names = _differences(module), {}
    for name in module.state_dict():
        part, _, parameter = name.rpartition(".")
        names[name] = f"{parts.get(part)}.{parameter}"
        if part not in parts:
            reasons.append(f"it has {name}, which is not a parameter of a plain layer")
    if reasons:
        raise unsupported(f"timm's counterpart of {type(module).__name__}", reasons)
    return names


def _differences(module: nn.Module) -> list[str]:
    """Return the settings of a vision module that have no equivalent in timm."""
    reasons = []
    gate = module.spatial if isinstance(module, CBAM) else module
    if isinstance(gate, SpatialAttention) and gate.norm is None:
        reasons.append("norm=False: timm's spatial gate always has a batch norm")
    if isinstance(module, CBAM) and module.order != "channel-spatial":
        reasons.append(f"order={module.order!r}: timm's module gates channels first")
    if isinstance(module, NonLocal):
        default = module.channels**-0.5
        if module.kind != "embedded":
            reasons.append(f"kind={module.kind!r}: timm's block is an embedded Gaussian")
        if module.subsample != 1:
            reasons.append(f"subsample={module.subsample}: timm's block keeps all positions")
        if module.scale not in (1.0, default):
            reasons.append(f"scale={module.scale:g}: timm's is 1 or channels ** -0.5, {default:g} here")
    return reasons
