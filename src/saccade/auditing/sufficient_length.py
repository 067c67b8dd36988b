"""The claim that the audited text is long enough to distinguish a rule with a window from one without a window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.auditing.declared_rules import Declared
from saccade.auditing.encoder_decoder import EncoderDecoderUnderTest
from saccade.auditing.finding import ClaimResult
from saccade.auditing.model_under_test import ModelUnderTest
from saccade.masks import Causal, Full, Mask
from saccade.support.language import Message, joined

_LONGEST = 1 << 20  # tokens; a rule that masks nothing more below this length counts as one that never does
_PLAIN: tuple[Mask, ...] = (Causal(), Full())


class Part(NamedTuple):
    """The rules of a model or of one part of an encoder-decoder, and the length of the text on which they were tested.

    Attributes:
        name: "encoder" or "decoder"; empty for a model without parts.
        rules: the rule of each layer, first to last.
        length: number of tokens.
        advice: a function that says which argument to pass for a text of a given number of tokens.
    """

    name: str
    rules: Sequence[Mask]
    length: int
    advice: Callable[[int], str]


def parts_of(declared: Declared, rules: Sequence[Mask], subject: ModelUnderTest, *, given: bool) -> list[Part]:
    """Return the rules of each part of a model, with the number of tokens on which an audit tests them.

    Args:
        declared: the rule as the user passed it.
        rules: the rule of each layer.
        subject: the model and its inputs.
        given: whether the user passed the inputs; if not, the argument ``length`` of `audit` determines their length.
    """

    def tokens(count: int) -> str:
        return Message("inputs with {count}", count=count) if given else f"length={count}"

    def targets(count: int) -> str:  # a random target has two thirds of the length of the source
        words = "decoder_input_ids with {count}"
        return Message(words, count=count) if given else f"length={-(-3 * count // 2)}"

    if not isinstance(subject, EncoderDecoderUnderTest):
        return [Part("", rules, subject.shape[1], tokens)]
    assert isinstance(declared, Mapping)  # `joint_rules` has checked it
    each = {name: [rule] if isinstance(rule, Mask) else list(rule) for name, rule in declared.items()}
    return [
        Part("encoder", each["encoder"], subject.source.shape[1], tokens),
        Part("decoder", each["decoder"], subject.target.shape[1], targets),
    ]


def check_length(parts: Sequence[Part]) -> list[ClaimResult]:
    """Return the claim "length", not answered, if a rule equals Causal() or Full() only because the text is too short.

    At 48 tokens, a causal window of 256 keys masks nothing more than Causal() does, so a model without any window also
    follows that rule. The list is empty if the text is long enough for every rule.

    Cost: O(length²) once for each distinct rule, and one row and one column of the rule for each of about 2 log2(needed
        length) lengths.
    """
    sentences = list[str]()
    for name, rules, length, advice in parts:
        needed, layers = dict[Mask, int](), dict[Mask, list[int]]()
        for rule in dict.fromkeys(rules):
            found = shortest_that_differs(rule, length)
            if found is not None:
                needed[found[0]] = max(needed.get(found[0], 0), found[1])
                layers.setdefault(found[0], []).extend(i for i, own in enumerate(rules, 1) if own == rule)
        for plain, own in layers.items():
            subject = Message("the {name} rule", name=name) if name else Message("the rule")
            if len(set(rules)) > 1:
                words = "{rule} of layers {layers}" if len(own) > 1 else "{rule} of layer {layers}"
                subject = Message(words, rule=subject, layers=", ".join(map(str, sorted(own))))
            words = "at {length} tokens {rule} hides nothing more than {plain} does; pass {advice} or more"
            advised = advice(needed[plain])
            sentences.append(Message(words, length=length, rule=subject, plain=str(plain), advice=advised))
    return [ClaimResult("length", "not answered", why=joined(sentences))] if sentences else []


def shortest_that_differs(rule: Mask, length: int) -> tuple[Mask, int] | None:
    """Return which of Causal() and Full() a rule equals at ``length``, and a length at which the two differ.

    The result is None if the rule equals neither, or if no length is found at which they differ.

    The length is found by doubling and bisection over the last row and the last column of the rule. It is therefore the
    shortest one only for rules that also mask keys at every greater length, as windows do. Rules that are defined for a
    fixed number of positions are not compared.
    """
    if isinstance(rule, Causal | Full) or any(side is not None for side in rule.domain):
        return None
    try:
        own = rule.to_dense(length).flatten(0, 1).any(0)
        plain = next((one for one in _PLAIN if torch.equal(own, one.to_dense(length)[0, 0])), None)
        if plain is None:
            return None
        least, most = length, 2 * length
        while not _differs(rule, plain, most):
            least, most = most, 2 * most
            if most > _LONGEST:
                return None
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if _differs(rule, plain, middle) else (middle, most)
    except Exception:
        if rule.calls_functions:  # a user's function may raise any error at positions for which it was not written
            return None
        raise
    return plain, most


def _differs(rule: Mask, plain: Mask, length: int) -> bool:
    """Return whether ``rule`` masks a pair of the last row or column that ``plain`` allows, at a given length."""
    last, every = torch.tensor([length - 1], device="cpu"), torch.arange(length, device="cpu")
    return any(bool((_allowed(plain, *pair) & ~_allowed(rule, *pair)).any()) for pair in ((last, every), (every, last)))


def _allowed(rule: Mask, q: Tensor, kv: Tensor) -> Tensor:
    """Return which pairs a rule allows in any batch item and head, bool ``[pairs]``."""
    b, h = (torch.arange(count, device="cpu") for count in rule.shape)
    allowed = rule.allows(b[:, None, None], h[None, :, None], q, kv)
    return allowed.broadcast_to(*rule.shape, max(len(q), len(kv))).flatten(0, 1).any(0)
