"""Our layers under torch's tensor parallel and DDP: what one process gives, gradients too."""

import copy

import pytest
import torch
from tests.distributed.gloo_processes import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import saccade as sc
from saccade import masks, mechanisms, nn, positions
from saccade.distributed import ContextParallel, parallelize, tp_plan
from saccade.models import Decoder, DecoderConfig

N = 24


def decoder(kv_heads=2, **more):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig(
            vocab_size=50, max_len=64, embed_dim=32, num_heads=8, num_kv_heads=kv_heads, num_layers=2,
            feed_forward_dim=48, mask=masks.sliding_window(9), **more,
        )
    ).double()  # fmt: skip


def whole_of(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def tensor_parallel(rank, ranks):
    """The largest difference of outputs and gradients, by the number of key heads."""
    found, tokens = {}, torch.arange(2 * N).view(2, N) % 50
    mesh = init_device_mesh("cpu", (ranks,))
    for kv_heads, more in ((8, {}), (4, {"gated": True, "attention_bias": True}), (2, {}), (1, {})):
        one = decoder(kv_heads, **more)
        many = copy.deepcopy(one)
        for layer in many.stack.layers:
            parallelize_module(layer, mesh, tp_plan(layer, ranks))
        torch.manual_seed(2)
        grad = torch.randn(2, N, 50, dtype=torch.float64)
        want, out = one(tokens), many(tokens)
        want.backward(grad)
        out.backward(grad)
        pairs = [(out, want)]
        pairs += [(whole_of(a.grad), b.grad) for a, b in zip(many.parameters(), one.parameters(), strict=True)]
        with torch.no_grad():
            cache, steps = many.new_cache(), tokens.split([N - 2, 1, 1], 1)
            pairs.append((torch.cat([many(step, cache=cache) for step in steps], 1), want))
        found[kv_heads] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(ranks):
    for found in on_ranks(ranks, tensor_parallel, ranks):
        assert isinstance(found, dict), found
        assert {heads: error for heads, error in found.items() if not error < 1e-10} == {}


def all_at_once(rank):
    """Two ranks share the heads, two the rows, and FSDP the parameters of those with the same heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    one, tokens = decoder(2), torch.arange(2 * N).view(2, N) % 50
    cp = ContextParallel(mesh["cp"], layout="zigzag")
    many = parallelize(copy.deepcopy(one), cp)
    for layer in many.stack.layers:
        parallelize_module(layer, mesh["tp"], tp_plan(layer, 2))
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(many, mesh=mesh["cp"])
    torch.manual_seed(2)
    grad = torch.randn(2, N, 50, dtype=torch.float64)
    want, out = one(tokens), many(cp.shard_sequence(tokens), positions=cp.positions(N))
    want.backward(grad)
    out.backward(cp.shard_sequence(grad) * cp.ranks)
    errors = [float((out - cp.shard_sequence(want)).detach().abs().max())]
    errors += [
        float((whole_of(a.grad) - b.grad).abs().max()) for a, b in zip(many.parameters(), one.parameters(), strict=True)
    ]
    return max(errors)


@pytest.mark.slow
def test_rows_heads_and_parameters_over_ranks():
    for found in on_ranks(4, all_at_once):
        assert isinstance(found, float), found
        assert found < 1e-10


def data_parallel(rank):
    """Three steps of DDP on halves of a batch, in every layer that has parameters of its own."""
    torch.manual_seed(0)
    layers = [
        nn.MultiHeadAttention(32, 4, mechanism=mechanisms.Softmax(bias=positions.Clipped(4, 5))),
        nn.DifferentialAttention(32, 2, mask=masks.Causal()),
        nn.Recurrence(32, 4, mechanisms.Delta(), decay="token"),
        nn.StateSpace(32, 8),
    ]
    one = torch.nn.Sequential(*(nn.EncoderLayer(layer, nn.FeedForward(32, 40)) for layer in layers)).double()
    many = DistributedDataParallel(copy.deepcopy(one))
    x = torch.linspace(-3, 3, 4 * N * 32, dtype=torch.float64).sin().view(4, N, 32)
    for model, own in ((one, x), (many, x[2 * rank : 2 * rank + 2])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            model(own).square().mean().backward()
            optimizer.step()
    pairs = zip(many.module.parameters(), one.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.slow
def test_data_parallel():
    for found in on_ranks(2, data_parallel):
        assert isinstance(found, float), found
        assert found < 1e-10


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.MultiHeadAttention(12, 3), "4 ranks do not divide 3 heads"),
        (nn.MultiHeadAttention(48, 12, num_kv_heads=3), "4 ranks do not divide 3 key heads"),
        (nn.MultiHeadAttention(8, 4, mechanism=mechanisms.Softmax(bias=positions.ALiBi(4))), "differs between heads"),
        (nn.MultiHeadAttention(8, 4, mask=masks.Dense(torch.ones(1, 4, 5, 5, dtype=torch.bool))), "its mask differs"),
        (nn.EncoderLayer(nn.StateSpace(8, 4), nn.FeedForward(8, 16)), "attention: StateSpace cannot be split by heads"),
        (nn.FeedForward(8, 10), "4 ranks do not divide 10 channels"),
        (torch.nn.Linear(2, 2), "no MultiHeadAttention and no FeedForward"),
    ],
)
def test_refused_splits(model, message):
    with pytest.raises(sc.UnsupportedError, match=message):
        tp_plan(model, 4)
