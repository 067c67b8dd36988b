"""An error names the public function that a user called, without being told its name."""

import pytest
import torch
from torch import nn

import saccade as sc
from saccade import masks
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention
from saccade.support import errors

X = torch.zeros(1, 2, 3, 8)


class Reversed(masks.Mask):
    """A mask that a user wrote, whose rule calls the library in a wrong way."""

    def allows(self, b, h, q, kv):
        return masks.Window(-1, 0).allows(b, h, q, kv)


class Calling(nn.Module):
    def forward(self, x):
        return sc.attention(x, x, x, scale="no")


CALLS = {
    "a function": (lambda: sc.attention(X, X, 3), "attention: value must"),
    "a check inside of a function that is public too": (lambda: sc.attention(X, X, X, 3), "attention: mask must"),
    "the same check called by a user": (lambda: masks.as_mask(3, (1, 1, 1, 1)), "as_mask: mask must"),
    "an argument that an inner class shares": (lambda: masks.longformer(4, [-1]), "longformer: positions must"),
    "an argument of the outer function": (lambda: masks.streaming(4, 0), "streaming: window must"),
    "a constructor": (lambda: masks.Window(-1, 0), "Window: left must"),
    "a constructor of a class with a private base": (lambda: masks.And((3,)), "And: parts must"),
    "a method of the base, on an object of a subclass": (lambda: masks.Causal().picture(200), "Causal.picture: q_len"),
    "an operator": (lambda: masks.Causal() & 3, "Causal: & must"),
    "a class method": (lambda: sc.models.Decoder.from_state_dict(3, {}), r"Decoder\.from_state_dict: .* must"),
    "a module": (lambda: MultiHeadAttention(8, 2)(X), "MultiHeadAttention: query must"),
    "a mechanism": (lambda: Softmax()(X, X, mask=3), "Softmax: mask must"),
    "a module of a user that calls a function": (lambda: Calling()(X), "attention: scale must"),
    "a rule of a user that is called by a function": (lambda: Reversed().to_dense(3), "Window: left must"),
    "a kernel": (lambda: sc.attention(X, X, X, impl="varlen"), 'attention: impl="varlen" cannot'),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_name_is_that_of(name):
    call, sentence = CALLS[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"^{sentence}"):
        call()


def test_a_call_without_an_error_reads_no_stack(monkeypatch):
    x, calls = torch.zeros(1, 1, 2, 4), []
    monkeypatch.setattr(errors, "called_function", lambda *given: calls.append(given) or "f")
    sc.attention(x, x, x, masks.Causal())
    assert not calls
    str(errors.value_error("x", "y", "z"))
    assert calls == [("x",)]
