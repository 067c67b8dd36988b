"""Models with replaced attention train as before: low-rank adapters, replicas, sharded parameters, checkpoints."""

import copy

import pytest
import torch
from tests.distributed.gloo_processes import on_ranks
from tests.integrations.own_code_attention import D, Einsum, Written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks

N = 12


class Block(nn.Module):
    """A residual block around attention."""

    def __init__(self, attention):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(D), attention

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Torch(nn.MultiheadAttention):
    """torch's layer, called with one argument."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Around(nn.Module):
    """A module around torch's layer."""

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x):
        return self.self_attn(x, x, x, need_weights=False)[0]


class LowRank(nn.Module):
    """A linear layer with a low-rank update beside it, as peft puts in its place."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, rank, bias=False), nn.Linear(rank, D, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class OnProjection(nn.Module):
    """An adapter on a linear layer that exposes the layer's weight and bias, as those of peft do."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, rank, bias=False), nn.Linear(rank, D, bias=False)
        self.merged = self.disable_adapters = False

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        out = self.base(x)
        return out if self.merged or self.disable_adapters else out + self.up(self.down(x))


class WholeAttention(nn.Module):
    """An adapter on ``nn.MultiheadAttention`` that merges its updates into the weights for each call, as peft does."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base, base.out_proj = base.requires_grad_(False), OnProjection(base.out_proj)
        self.down, self.up = nn.Linear(D, rank, bias=False), nn.Linear(rank, 3 * D, bias=False)

    def forward(self, *args, **kwargs):
        projection = self.base.out_proj
        layers = [(self.base, "in_proj_weight", self), (projection.base, "weight", projection)]
        weights = [getattr(holder, name) for holder, name, _ in layers]
        for (holder, name, adapter), weight in zip(layers, weights, strict=True):
            delattr(holder, name)
            setattr(holder, name, weight.detach() + adapter.up.weight @ adapter.down.weight)
        projection.merged = True
        try:
            return self.base(*args, **kwargs)
        finally:
            projection.merged = False
            for (holder, name, _), weight in zip(layers, weights, strict=True):
                delattr(holder, name)
                holder.register_parameter(name, weight)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*map(Block, (Written(), Torch(D, 4, batch_first=True), Einsum()))).double()


def replaced(one):
    other = copy.deepcopy(one)
    sc.replace_attention(other, cross_attention=[])
    return other


def inputs():
    return torch.linspace(-3, 3, 4 * N * D, dtype=torch.float64).sin().view(4, N, D)


def trained(model, run, x=None, steps=3):
    """Train for some steps; return the parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        run(inputs() if x is None else x).square().mean().backward()
        optimizer.step()
    return [whole_of(p).detach() for p in model.parameters()]


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest_difference(ours, theirs):
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def test_low_rank_adapters():
    one = model()
    for block in (one[0], one[2]):
        for name in ("q", "v"):
            setattr(block.attn, name, LowRank(getattr(block.attn, name)).double())
    other = replaced(one)
    frozen = other[0].attn.q.base.weight.clone()
    assert largest_difference(trained(other, other), trained(one, one)) < 1e-12
    assert torch.equal(other[0].attn.q.base.weight, frozen)


def test_adapters_that_are_added_after_the_replacement():
    one = model()
    other = replaced(one)
    for some in (one, other):
        torch.manual_seed(1)
        some[0].attn.q = LowRank(some[0].attn.q).double()
    assert largest_difference(trained(other, other), trained(one, one)) < 1e-12


@pytest.mark.parametrize("is_first", [True, False])
def test_an_adapter_of_the_whole_attention(is_first):
    torch.manual_seed(0)
    one = Block(Around()).double()
    other = copy.deepcopy(one) if is_first else replaced(one)
    for some in (one, other):
        torch.manual_seed(1)
        some.attn.self_attn = WholeAttention(some.attn.self_attn).double()
    if is_first:
        sc.replace_attention(other, cross_attention=[])
    assert "TorchAttention" in str(other)
    before = other.attn.self_attn.up.weight.clone()
    assert largest_difference(trained(other, other), trained(one, one)) < 1e-12
    assert not torch.equal(other.attn.self_attn.up.weight, before)


def test_an_adapter_that_torch_ignores_is_refused():
    one = Block(Around()).double()
    other = replaced(one)
    for some in (one, other):
        some.attn.self_attn.out_proj = OnProjection(some.attn.self_attn.out_proj).double()
    one(inputs()).sum().backward()
    assert one.attn.self_attn.out_proj.up.weight.grad is None
    with pytest.raises(sc.UnsupportedError, match="reads the weight of out_proj without calling it"):
        other(inputs())
    other.attn.self_attn.out_proj.disable_adapters = True
    torch.testing.assert_close(other(inputs()), one(inputs()))


def test_checkpointed_blocks():
    one = model()
    other = replaced(one)

    def checkpointed(x):
        for block in other:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert largest_difference(trained(other, checkpointed), trained(one, one)) < 1e-12


def over_ranks(rank):
    """The largest differences with replicas and with sharded parameters, of halves of a batch and of the whole."""
    one = model()
    many, sharded = DistributedDataParallel(replaced(one)), replaced(one)
    mesh = init_device_mesh("cpu", (2,))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    own = inputs()[2 * rank : 2 * rank + 2]
    found = [trained(many.module, many, own), trained(sharded, sharded, own)]
    expected = trained(one, one)
    return [largest_difference(ours, expected) for ours in found]


@pytest.mark.slow
def test_replicas_and_sharded_parameters():
    for found in on_ranks(2, over_ranks):
        assert isinstance(found, list), found
        assert max(found) < 1e-12


def test_a_mask_holds_while_it_trains():
    one = model()
    sc.replace_attention(one, mask=masks.Causal(), cross_attention=[])
    x = inputs().requires_grad_()
    one(x)[:, 4].sum().backward()
    assert float(x.grad[:, 5:].abs().max()) == 0.0
    assert float(x.grad[:, :5].abs().min()) > 0.0


def test_a_first_run_of_one_token():
    one = model()
    other = replaced(one)
    x = inputs()[:, :1]
    torch.testing.assert_close(other(x), one(x))
    with sc.intervene(one) as edit:
        edit.ablate("0.attn", None)
        edit.ablate("2.attn", None)
        ablated = one(x)
    without = copy.deepcopy(one)
    for block in (without[0], without[2]):
        block.attn.v = nn.Linear(D, D).double().requires_grad_(False)
        nn.init.zeros_(block.attn.v.weight)
        nn.init.zeros_(block.attn.v.bias)
    torch.testing.assert_close(ablated, without(x))
