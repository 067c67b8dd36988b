"""Audits by one of several processes: ``python -m tests.auditing.rank_process RANK SIZE FILE CASE ...``."""

import datetime as dt
import json
import sys

import torch
from tests.auditing.small_transformer import Layer, Mixer, small
from torch import distributed

from saccade import audit, masks

CAUSAL, DOCUMENTS = masks.Causal(), masks.Documents([10, 18, 12], rule=masks.Causal())
WIDTH, LENGTH, BORDER = 24, 40, 20


class Gathered(torch.autograd.Function):
    """An all-gather of rows. That of torch.distributed.nn gives wrong gradients if they are transposed."""

    @staticmethod
    def forward(ctx, rows):
        rows = rows.contiguous()
        parts = [torch.empty_like(rows) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, rows)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total[:, mine()]


gathered = Gathered.apply


class ContextParallel(Mixer):
    """A mixer with the rows of this process and the keys of all processes.

    ``forgets``: "documents" in keys of other processes, or the "key" before its first row.
    ``is_local``: it is given, and gives, its own rows alone.
    """

    def __init__(self, width, mask, is_local=False, forgets=""):
        super().__init__(width, mask)
        self.is_local, self.forgets = is_local, forgets

    def forward(self, x):
        own = mine()
        query, key, value = self.made(x if self.is_local else x[:, own]).chunk(3, -1)
        key, value = gathered(key), gathered(value)
        allowed = self.mask.to_dense(LENGTH)[0, 0, own].clone()
        if self.forgets == "key" and own.start:
            allowed[0, own.start - 1] = False
        if self.forgets == "documents":
            others = torch.ones(LENGTH, dtype=torch.bool)
            others[own] = False
            allowed |= CAUSAL.to_dense(LENGTH)[0, 0, own] & others
        scores = (query @ key.mT / WIDTH**0.5).masked_fill(~allowed, float("-inf"))
        rows = self.out(scores.softmax(-1) @ value)
        return rows if self.is_local else gathered(rows)


class Sharded(torch.nn.Module):
    """A model that keeps the rows of its own process from the embedding on."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, tokens):
        x = self.whole.embedding(tokens)[:, mine()]
        for layer in self.whole.layers:
            x = layer(x)
        return self.whole.head(x)


class Unsteady(torch.nn.Module):
    """A model whose output has different noise in every process and run."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.draw = whole, torch.Generator().manual_seed(distributed.get_rank())

    def forward(self, tokens):
        noise = torch.randn((*tokens.shape, 1), generator=self.draw)
        is_there = torch.rand((), generator=self.draw) < 0.5
        return self.whole(tokens) + 1e-6 * noise * is_there


def mine():
    rank, size = distributed.get_rank(), distributed.get_world_size()
    return slice(LENGTH * rank // size, LENGTH * (rank + 1) // size)


def parallel(is_local=False, forgets=""):
    each = ("", forgets, "")
    layers = {i: Layer(WIDTH, ContextParallel(WIDTH, DOCUMENTS, is_local, each[i])) for i in range(3)}
    return small(DOCUMENTS, layers, layers=3)


def leaking():
    return small(DOCUMENTS, {1: Layer(WIDTH, Mixer(WIDTH, CAUSAL))}, layers=3)


def one_of_them(tokens):
    model = Replicas(small(DOCUMENTS, layers=3))
    return None if distributed.get_rank() else audit(model, DOCUMENTS, inputs=tokens)


Replicas = torch.nn.parallel.DistributedDataParallel
CASES = {
    "right": lambda tokens: together(parallel(), tokens),
    "forgets documents": lambda tokens: together(parallel(forgets="documents"), tokens),
    "forgets a key": lambda tokens: together(parallel(forgets="key"), tokens),
    "own rows": lambda tokens: together(Sharded(parallel(True)), tokens, outputs=gathered),
    "own rows, forgets documents": lambda tokens: together(
        Sharded(parallel(True, "documents")), tokens, outputs=gathered
    ),
    "unsteady": lambda tokens: together(Unsteady(parallel()), tokens),
    "other inputs": lambda tokens: together(parallel(), tokens + distributed.get_rank()),
    "other ways": lambda tokens: together(parallel(), tokens, padded=True),
    "replicas leak": lambda tokens: audit(Replicas(leaking()), DOCUMENTS, inputs=tokens),
    "one replica alone": one_of_them,
}


def together(model, tokens, **options):
    return audit(model, DOCUMENTS, inputs=tokens, layers=3, group=distributed.group.WORLD, **options)


def told(name):
    """Return the claims of a case, or the reason why there are none."""
    tokens = torch.randint(40, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    try:
        report = CASES[name](tokens)
    except ValueError as error:
        return str(error)
    return None if report is None else report.to_json()["claims"]


def main(rank, size, path, *names):
    wait = dt.timedelta(seconds=30)
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=wait)
    print(json.dumps({name: told(name) for name in names}))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
