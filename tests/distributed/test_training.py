"""Training with rows over ranks and parameters over the same ranks: three steps are those of one process."""

import pytest
import torch
import torch.distributed as dist
from tests.distributed.gloo_processes import on_ranks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from saccade import masks, positions
from saccade.distributed import ContextParallel
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention

N, WORDS, WIDTH = 40, 11, 32


class Model(nn.Module):
    """Two layers of different masks, the first a window."""

    def __init__(self, around):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        rules = (masks.sliding_window(6), masks.Documents([15, 25], rule=masks.Causal()))
        self.layers = nn.ModuleList(
            MultiHeadAttention(
                WIDTH, 4, num_kv_heads=2, mask=rule, rotary=positions.Rotary(8), mechanism=around(Softmax())
            )
            for rule in rules
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, stands):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(x, positions=stands)
        return self.head(x)


def batch():
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (2, N), generator=drawn)
    labels = torch.randint(WORDS, (2, N), generator=drawn)
    labels[:, :13] = -100  # so that ranks have unequal numbers of labels
    return tokens, labels


def on_one():
    model = Model(lambda mechanism: mechanism).double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    tokens, labels = batch()
    for _ in range(3):
        loss = F.cross_entropy(model(tokens, torch.arange(N)).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, [x.detach() for x in model.parameters()]


def on_many(rank, layout):
    losses, expected = on_one()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    cp = ContextParallel(mesh, layout=layout)
    model = Model(cp).double()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    tokens, labels = (cp.shard_sequence(x) for x in batch())
    for _ in range(3):
        total = F.cross_entropy(model(tokens, cp.positions(N)).flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels >= 0).sum()
        dist.all_reduce(count)
        optimizer.zero_grad()
        (total * cp.ranks / count).backward()  # gradients are averaged over ranks
        optimizer.step()
        dist.all_reduce(total := total.detach())
        found.append(float(total / count))
    own = [x.full_tensor().detach() for x in model.parameters()]
    errors = [float((a - b).abs().max()) for a, b in zip(own, expected, strict=True)]
    return max(abs(a - b) for a, b in zip(found, losses, strict=True)), max(errors), losses[0] - losses[-1]


@pytest.mark.slow
def test_three_steps_are_those_of_one_process():
    for found in on_ranks(2, on_many, "zigzag"):
        assert isinstance(found, tuple), found
        of_loss, of_parameters, gained = found
        assert of_loss < 1e-12
        assert of_parameters < 1e-10
        assert gained > 0.01


def saved(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = Model(ContextParallel(mesh)).double()
    fully_shard(model, mesh=mesh)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    return "saved"


def loaded(rank, folder):
    """The largest difference to what was saved, on other ranks than those that saved it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = Model(ContextParallel(mesh)).double()
    expected = [x.detach().clone() for x in model.parameters()]
    with torch.no_grad():
        for x in model.parameters():
            x.zero_()
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    own = [x.full_tensor().detach() for x in model.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(own, expected, strict=True))


@pytest.mark.slow  # three sets of processes
def test_a_checkpoint_is_loaded_on_other_numbers_of_ranks(tmp_path):
    assert on_ranks(4, saved, str(tmp_path / "model")) == ["saved"] * 4
    for ranks in (1, 2):
        assert on_ranks(ranks, loaded, str(tmp_path / "model")) == [0.0] * ranks
