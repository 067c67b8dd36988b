"""An encoder-decoder under test, treated as one model over the source tokens followed by the target tokens."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade import masks
from saccade.auditing.declared_rules import Declared
from saccade.auditing.finding import CounterExample
from saccade.auditing.model_under_test import ModelUnderTest, depth_of, rows_of
from saccade.masks import Mask
from saccade.models import EncoderDecoder
from saccade.support.errors import shown, type_error, value_error
from saccade.support.language import Message, joined

_SOURCE, _TARGET = "input_ids", "decoder_input_ids"
_DEEP = 1 << 20  # a number larger than the depth of any model


def is_encoder_decoder(model: object) -> bool:
    """Return whether a model takes a source and a target, like the encoder-decoders of transformers and saccade."""
    if isinstance(model, EncoderDecoder):
        return True
    return isinstance(model, nn.Module) and _TARGET in inspect.signature(model.forward).parameters


class EncoderDecoderUnderTest(ModelUnderTest):
    """An encoder-decoder under test. Its tokens are the source tokens followed by the target tokens.

    Args:
        model: a transformers model with ``get_encoder()``, or a `saccade.models.EncoderDecoder`.
        inputs: keyword arguments, including the token ids ``input_ids`` ``[batch, source_len]`` and
            ``decoder_input_ids`` ``[batch, target_len]``.
        outputs: a function that extracts the target's rows from the model's result. The source's rows are the encoder's
            output.
    """

    def _find(self) -> None:
        self.source, self.target = _source_and_target(self.inputs)
        named: Any = self.model
        encoder = named.get_encoder() if hasattr(named, "get_encoder") else getattr(named, "encoder", None)
        if not isinstance(encoder, nn.Module):
            rule = "have an encoder, or get_encoder(), since its forward takes decoder_input_ids"
            raise value_error("the model", rule, type(named).__name__)
        self.encoder = encoder
        self._prefix = next(name for name, own in named.named_modules() if own is self.encoder) + "."
        self.tokens = self.raw_tokens = self.source

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.source), self.source.shape[1] + self.target.shape[1]

    @property
    def parts(self) -> dict[str, slice]:
        start = self.source.shape[1]
        return {"source": slice(0, start), "target": slice(start, self.shape[1])}

    @property
    def depths(self) -> tuple[int, int]:
        """The numbers of encoder and decoder layers, inferred from the layer indices in module names."""
        found = {True: 1, False: 1}
        for name in self.modules:
            inside = name.startswith(self._prefix)
            if (depth := depth_of(name, _DEEP)) < _DEEP - 1:
                found[inside] = max(found[inside], depth + 1)
        return found[True], found[False]

    def layer_of(self, name: str, layers: int) -> int:
        encoder, decoder = self.depths
        return depth_of(name, encoder) if name.startswith(self._prefix) else encoder + depth_of(name, decoder)

    def part_of(self, name: str) -> slice:
        return self.parts["source" if name.startswith(self._prefix) else "target"]

    def encoder_span(self, hidden: Tensor) -> slice | None:
        is_source = hidden.shape == self.encoded.shape and torch.equal(hidden, self.encoded)
        return self.parts["source"] if is_source else None

    def renumbered(self, finding: CounterExample) -> CounterExample:
        row, key = (None if at is None else self._text_and_position(at) for at in (finding.row, finding.key))
        assert row is not None
        nouns = (row[0], "token" if key is None else key[0])
        return dataclasses.replace(finding, row=row[1], key=None if key is None else key[1], nouns=nouns)

    def _text_and_position(self, at: tuple[int, int]) -> tuple[str, tuple[int, int]]:
        start = self.parts["target"].start
        return ("source", at) if at[1] < start else ("target", (at[0], at[1] - start))

    def _run(self, vectors: Tensor | None) -> Tensor:
        self.passes += 1
        left, kept = {"source": self.source, "target": self.target}, dict[str, Tensor]()

        def swap(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor | None:
            ids = arguments[0] if arguments else None
            part = next((name for name, own in left.items() if isinstance(ids, Tensor) and torch.equal(ids, own)), None)
            if part is None:
                return None
            del left[part]
            kept[part] = out.detach().clone()
            return None if vectors is None else vectors[:, self.parts[part]].clone()  # some models scale them in place

        def keep(module: nn.Module, arguments: tuple[Any, ...], out: Any) -> None:
            self.encoded = rows_of(out)

        model: Any = self.model
        tables = [own for own in model.modules() if isinstance(own, nn.Embedding)]
        handles = [own.register_forward_hook(swap) for own in tables]
        handles.append(self.encoder.register_forward_hook(keep))
        try:
            target = self.outputs(self._call_model(self.tokens))
        finally:
            for handle in handles:
                handle.remove()
        if left or kept["source"].shape[2:] != kept["target"].shape[2:]:
            rule = "look up both texts in torch.nn.Embedding tables of equal width"
            got = f"no lookup of the {next(iter(left))}" if left else [list(one.shape) for one in kept.values()]
            raise value_error("the model", rule, got)
        if not hasattr(self, "vectors"):  # later results may differ by a unit of rounding
            self.vectors = torch.cat([kept["source"], kept["target"]], 1)
        return _joined(self.encoded, target)

    def _call_model(self, tokens: Tensor) -> Any:
        assert isinstance(self.inputs, Mapping)  # otherwise _source_and_target would have raised an error
        if isinstance(self.model, EncoderDecoder):
            more = {name: one for name, one in self.inputs.items() if name not in (_SOURCE, _TARGET)}
            return self.model(self.source, self.target, **more)
        return self.model(**self.inputs)


def _source_and_target(inputs: object) -> tuple[Tensor, Tensor]:
    found = [inputs.get(name) if isinstance(inputs, Mapping) else None for name in (_SOURCE, _TARGET)]
    source, target = found
    if not (isinstance(source, Tensor) and isinstance(target, Tensor) and source.dim() == target.dim() == 2):
        rule = f"have token ids {_SOURCE} and {_TARGET}, [batch, length], for an encoder-decoder"
        hint = "if the source is not a text, audit the decoder: audit(decoder, rule, inputs=dict(input_ids=..., ...))"
        raise value_error("inputs", rule, sorted(inputs) if isinstance(inputs, Mapping) else inputs, hint=hint)
    if len(source) != len(target):
        rule = f"have as many texts in {_TARGET} as in {_SOURCE}, {len(source)}"
        raise value_error("inputs", rule, len(target))
    return source, target


def _joined(source: Tensor, target: Tensor) -> Tensor:
    """Concatenate the rows of an encoder-decoder's source and target, padding the narrower rows with zeros."""
    both = [rows.reshape(*rows.shape[:2], -1) for rows in (source, target)]
    width = max(rows.shape[-1] for rows in both)
    return torch.cat([F.pad(rows, (0, width - rows.shape[-1])) for rows in both], 1)


_NAMES = ("encoder", "decoder", "cross")
_WITHOUT_WINDOWS = (
    "t5",
    "mt5",
    "umt5",
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "m2m_100",
    "blenderbot",
    "blenderbot-small",
)


def default_rules(model: Any) -> dict[str, Mask] | None:
    """Return the three rules of a plain encoder-decoder; None for other models, such as models with windows."""
    if (
        isinstance(model, EncoderDecoder)
        or getattr(getattr(model, "config", None), "model_type", "") in _WITHOUT_WINDOWS
    ):
        return {"encoder": masks.Full(), "decoder": masks.Causal(), "cross": masks.Full()}
    return None


def joint_rules(declared: Declared, subject: EncoderDecoderUnderTest) -> tuple[list[Mask], str]:
    r"""Return joint rules over source and target tokens, one for each encoder and decoder layer, and a description.

    .. math:: \begin{pmatrix} M_\text{encoder} & 0 \\ 0 & 0 \end{pmatrix}, \quad
              \begin{pmatrix} 0 & 0 \\ M_\text{cross} & M_\text{decoder} \end{pmatrix}

    A decoder layer applies self-attention and cross-attention, each with a residual connection. Their composition is
    the union of their rules, because no source token depends on a target token.

    Raises:
        TypeError, ValueError: ``declared`` is not a mapping from "encoder", "decoder" and "cross" to masks, or to lists
            with one mask for each layer.
    """
    hint = 'rule={"encoder": masks.Full(), "decoder": masks.Causal(), "cross": masks.Full()}'
    if not isinstance(declared, Mapping) or set(declared) != set(_NAMES):
        got = sorted(declared) if isinstance(declared, Mapping) else declared
        rule = f"have the keys {', '.join(_NAMES)} for an encoder-decoder"
        raise value_error("rule", rule, got, hint=hint)
    depths = dict(zip(_NAMES, (subject.depths[0], subject.depths[1], subject.depths[1]), strict=True))
    each = {name: _rules_of_layers(name, declared[name], depths[name]) for name in _NAMES}
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
    return layers, joined(
        Message("{name} {rules}", name=Message(name), rules=_describe(rules)) for name, rules in each.items()
    )


def _rules_of_layers(name: str, rule: Mask | Sequence[Mask], layers: int) -> list[Mask]:
    found = [rule] * layers if isinstance(rule, Mask) else list(rule) if isinstance(rule, list | tuple) else []
    if not found or not all(isinstance(one, Mask) for one in found):
        raise type_error(f"rule of {name}", "be a mask, or a list with one for each layer", shown(rule))
    if len(found) != layers:
        rule_of = f"be one mask for each of {layers} layers"
        raise value_error(f"rule of {name}", rule_of, f"{len(found)} masks")
    return found


def _dense(rule: Mask, rows: int, keys: int, batch: int) -> Tensor:
    return rule.to_dense(rows, keys, batch=batch, heads=rule.shape[1]).any(1)


def _describe(rules: list[Mask]) -> Message:
    if all(rule == rules[0] for rule in rules):
        return Message("{rule} in {count} layers", rule=rules[0], count=len(rules))
    return Message(", ".join(str(rule) for rule in rules))
