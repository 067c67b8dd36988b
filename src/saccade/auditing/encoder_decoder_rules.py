"""Three rules of an encoder-decoder as one rule for each layer, over the tokens of both texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade import masks
from saccade.auditing.declared_rules import Declared
from saccade.auditing.encoder_decoder_subject import PairSubject
from saccade.masks import Mask
from saccade.models import EncoderDecoder
from saccade.support.errors import shown, type_error, value_error

_NAMES = ("encoder", "decoder", "cross")
_WHOLE = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small")


def pair_from_config(model: Any) -> dict[str, Mask] | None:
    """What transformers' plain encoder-decoders and ours declare; None for others, such as those with windows."""
    if isinstance(model, EncoderDecoder) or getattr(getattr(model, "config", None), "model_type", "") in _WHOLE:
        return {"encoder": masks.Full(), "decoder": masks.Causal(), "cross": masks.Full()}
    return None


def joint_rules(declared: Declared, subject: PairSubject) -> tuple[list[Mask], str]:
    r"""One rule for each layer of the encoder and then of the decoder, among source and target tokens; and its text.

    .. math:: \begin{pmatrix} M_\text{encoder} & 0 \\ 0 & 0 \end{pmatrix}, \quad
              \begin{pmatrix} 0 & 0 \\ M_\text{cross} & M_\text{decoder} \end{pmatrix}

    A layer of the decoder is two steps, closed by residual connections. Their product is their union, since no token
    of the target lies behind one of the source.

    Raises:
        TypeError, ValueError: anything but masks, or lists of one for each layer, under these three names.
    """
    hint = 'rule={"encoder": masks.Full(), "decoder": masks.Causal(), "cross": masks.Full()}'
    if not isinstance(declared, Mapping) or set(declared) != set(_NAMES):
        got = sorted(declared) if isinstance(declared, Mapping) else declared
        rule = f"be three, {', '.join(_NAMES)}, for a model that reads two texts"
        raise value_error("rule", rule, got, hint=hint)
    depths = dict(zip(_NAMES, (subject.depths[0], subject.depths[1], subject.depths[1]), strict=True))
    each = {name: _each(name, declared[name], depths[name]) for name in _NAMES}
    source, target = subject.source.shape[1], subject.target.shape[1]
    is_one = all(rule.shape[0] == 1 for rules in each.values() for rule in rules)
    batch = 1 if is_one else subject.shape[0]
    found: dict[tuple[Mask, ...], Mask] = {}
    for rules in [(rule,) for rule in each["encoder"]] + list(zip(each["decoder"], each["cross"], strict=True)):
        if rules in found:
            continue
        joint = torch.zeros(batch, source + target, source + target, dtype=torch.bool)
        if len(rules) == 1:
            joint[:, :source, :source] = _dense(rules[0], source, source, batch)
        else:
            joint[:, source:, source:] = _dense(rules[0], target, target, batch)
            joint[:, source:, :source] = _dense(rules[1], target, source, batch)
        found[rules] = masks.Dense(joint)
    layers = [found[(rule,)] for rule in each["encoder"]]
    layers += [found[own, across] for own, across in zip(each["decoder"], each["cross"], strict=True)]
    return layers, "; ".join(f"{name} {_told(rules)}" for name, rules in each.items())


def _each(name: str, rule: Mask | Sequence[Mask], layers: int) -> list[Mask]:
    found = [rule] * layers if isinstance(rule, Mask) else list(rule) if isinstance(rule, list | tuple) else []
    if not found or not all(isinstance(one, Mask) for one in found):
        raise type_error(f"rule of {name}", "be a mask, or a list with one for each layer", shown(rule))
    if len(found) != layers:
        rule_of = f"be one mask for each of {layers} layers"
        raise value_error(f"rule of {name}", rule_of, f"{len(found)} masks")
    return found


def _dense(rule: Mask, rows: int, keys: int, batch: int) -> Tensor:
    return rule.to_dense(rows, keys, batch=batch, heads=rule.shape[1]).any(1)


def _told(rules: list[Mask]) -> str:
    if all(rule == rules[0] for rule in rules):
        return f"{rules[0]} in {len(rules)} layers"
    return ", ".join(str(rule) for rule in rules)
