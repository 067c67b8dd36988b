"""Modules that write attention out are found in their code, and no others; replace_attention refuses them by name."""

import linecache
import re
import textwrap

import pytest
import torch
from tests.integrations import model_zoo as zoo
from tests.integrations.replaceable_models import D, One, TimmForm
from torch import nn
from torch.nn import functional as F
from transformers import LongT5Config, LongT5Model

import saccade as sc
from saccade import masks
from saccade.integrations.written_out import written_out

ATTENDS = {
    "at": "return (q @ k.mT).softmax(-1) @ v",
    "matmul": "w = torch.softmax(q @ k.mT, dim=-1)\nreturn torch.matmul(w, v)",
    "bmm": "return torch.bmm(F.softmax(torch.bmm(q, k.mT), -1), v)",
    "einsum": "w = torch.einsum('bqd,bkd->bqk', q, k).softmax(-1)\nreturn torch.einsum('bqk,bkd->bqd', w, v)",
    "swapped": "w = (k @ q.mT).softmax(-2)\nreturn v.mT @ w",
    "module": "return self.attend(q @ k.mT) @ v",
    "made here": "return nn.Softmax(-1)(q @ k.mT) @ v",
    "dropout": "attn = (q @ k.mT).softmax(-1)\nattn = self.drop(attn)\nreturn attn @ v",
    "cast": "w = F.softmax(q @ k.mT, -1, dtype=torch.float32).to(v.dtype)\nreturn w @ v",
    "masked": "p = (q @ k.mT).softmax(-1)\np = p.masked_fill(mask, 0.0)\nreturn p @ v",
    "times": "attn = (q @ k.mT).softmax(-1)\nattn = attn * mask\nreturn attn @ v",
    "normalised": "attn = (q @ k.mT).softmax(-1) + mask\nattn /= attn.sum(-1, keepdim=True)\nreturn attn @ v",
    "gated": "attn = self.gate * (q @ k.mT).softmax(-1) + (1 - self.gate) * mask\nreturn attn @ v",
    "a method": "return self.weights(q, k) @ v",
    "a tuple": "scores, probs = self.both(q, k)\nreturn probs @ v",
    "a function": "return weights_of(q, k) @ v",
    "a function for all": "return attended(q, k, v)",
    "a method for all": "return self.product(self.weights(q, k), v)",
    "kept": "self.seen = (q @ k.mT).softmax(-1)\nreturn self.seen @ v",
    "parts": "return torch.cat([part.softmax(-1) @ v[:1] for part in (q @ k.mT).chunk(2)])",
    "list": "w = [part.softmax(-1) for part in (q @ k.mT).chunk(2)]\nreturn torch.cat(w) @ v",
    "branch": "if mask is None:\n    w = q @ k.mT\nelse:\n    w = (q @ k.mT).softmax(-1)\nreturn w @ v",
    "loop": "w = v\nfor _ in range(2):\n    out = w @ v\n    w = (q @ k.mT).softmax(-1)\nreturn out",
    "sdpa": "return F.scaled_dot_product_attention(q, k, v)",
    "a module of theirs": "return self.own(q @ k.mT) @ v",
}
DOES_NOT = {
    "classifier": "return (q @ k.mT).softmax(-1)",
    "router": "gate = self.linear(q).softmax(-1)\nout = gate * v\nreturn out @ k.mT",
    "best": "weights, chosen = (q @ k.mT).softmax(-1).topk(2)\nreturn weights @ v",
    "loss": "p = q.softmax(-1)\nloss = -(p * p.log()).sum()\nreturn q @ k.mT + loss",
    "beside": "scores = q @ k.mT\nreturn scores @ v, scores.softmax(-1)",
    "overwritten": "w = q.softmax(-1)\nw = k\nreturn w @ v.mT",
    "shape": "w = q.softmax(-1)\nreturn v.reshape(w.shape[0], -1) @ k[0]",
    "log": "return q.log_softmax(-1) @ k.mT",
    "part": "return self.linear(q)",
}
HELPERS = """
def weights_of(q, k):
    scores = q @ k.mT
    return scores.softmax(-1)


def attended(q, k, v):
    attn = F.dropout(weights_of(q, k), 0.1)
    return attn @ v


class Own(nn.Module):
    def forward(self, x):
        return x.softmax(-1)


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.drop, self.own = nn.Softmax(-1), nn.Dropout(0.1), Own()
        self.linear, self.gate = nn.Linear(4, 4), nn.Parameter(torch.ones(1))

    def weights(self, q, k):
        return (q @ k.mT).softmax(-1)

    def both(self, q, k):
        scores = q @ k.mT
        return scores, scores.softmax(-1)

    def product(self, attn, v):
        return attn @ v

    def forward(self, q, k, v, mask):
"""


def of(body):
    """A module with this forward, of which the source is known."""
    source = HELPERS + textwrap.indent(body, " " * 8) + "\n"
    name = f"<written {hash(body)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    places = {"nn": nn, "F": F, "torch": torch, "__name__": "theirs"}
    exec(compile(source, name, "exec"), places)
    return places["Written"]()


@pytest.mark.parametrize("form", ATTENDS)
def test_code_that_attends(form):
    model = of(ATTENDS[form])
    model(*(torch.randn(2, 4, 4) for _ in range(3)), torch.ones(4, 4, dtype=torch.bool))  # it is code that runs
    assert written_out(model)


@pytest.mark.parametrize("form", DOES_NOT)
def test_code_that_does_not(form):
    assert not written_out(of(DOES_NOT[form]))


def test_code_without_a_source():
    def named(body):
        places = {"nn": nn, "torch": torch, "__name__": "theirs"}
        exec(f"class Unseen(nn.Module):\n    def forward(self, q, k, v):\n        return {body}", places)
        return places["Unseen"]()

    assert written_out(named("torch.softmax(q @ k.mT, -1) @ v"))
    assert written_out(named("torch.softmax(q, -1).matmul(v)"))
    assert not written_out(named("torch.softmax(q, -1)"))
    assert not written_out(named("q @ v"))


class SelfAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q @ k.mT / 4).softmax(-1) @ v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Sequential(SelfAttn()), One(batch_first=True).float()

    def forward(self, x):
        x = x + self.a(x)
        return x + self.b(x, x, x, need_weights=False)[0]


def test_it_is_refused_by_name_and_may_be_left_as_it_is():
    model = Net()
    before = str(model)
    words = (
        "- a.0 is SelfAttn: it multiplies the result of a softmax in operations of its own\nHint: leave=['a.0'] leaves"
    )
    with pytest.raises(sc.UnsupportedError, match=re.escape(words)):
        sc.replace_attention(model, mask=masks.Window(2, 0))
    assert str(model) == before
    left = Net()
    left.load_state_dict(model.state_dict())
    assert [one.name for one in sc.replace_attention(left, leave=["a"])] == ["b.inner"]
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(left(x), model(x))


@pytest.mark.parametrize("leave", [["*.0"], ["a.0", "b"], ["a*", "b.inner"]], ids=str)
def test_names_of_what_is_left(leave):
    model = nn.ModuleDict({"a": nn.Sequential(SelfAttn()), "b": One(), "c": TimmForm()})
    expected = ["b.inner", "c"] if leave == ["*.0"] else ["c"]
    assert [one.name for one in sc.replace_attention(model, leave=leave)] == expected


@pytest.mark.parametrize(
    "leave, error, words",
    [
        ("a.0", TypeError, r"leave must be a list of names, or None; got str"),
        ([3], TypeError, r"leave must be a list of names, or None; got int"),
        (["d"], ValueError, r"leave must hold names of modules of the model; got 'd'"),
    ],
)
def test_wrong_names_to_leave_are_refused(leave, error, words):
    with pytest.raises(error, match=words):
        sc.replace_attention(Net(), leave=leave)


def test_a_model_that_is_itself_written_out():
    with pytest.raises(sc.UnsupportedError, match=r"the model is SelfAttn: it multiplies the result of a softmax"):
        sc.replace_attention(SelfAttn())


@pytest.mark.parametrize("name", [name for name in zoo.ALL if name not in (*zoo.PAIRED, "gemma2", "gpt_oss")])
def test_models_of_transformers_are_none(name):
    network = zoo.model(name)
    assert not any(written_out(part) for part in network.modules())
    assert sc.replace_attention(network)


def test_a_model_of_transformers_that_writes_out_some_is_refused():
    config = LongT5Config(
        vocab_size=zoo.WORDS, d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=40, local_radius=4, pad_token_id=0,
        decoder_start_token_id=1,
    )  # fmt: skip
    network = LongT5Model(config)
    network._supports_sdpa = True  # else the whole model is refused
    name = "encoder.block.0.layer.0.LocalSelfAttention"
    with pytest.raises(sc.UnsupportedError, match=rf"- {name} is LongT5LocalAttention: it multiplies"):
        sc.replace_attention(network)
    assert sc.replace_attention(network, leave=[name])
