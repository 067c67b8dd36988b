"""Speed of packed documents beside a padded batch, and beside SDPA with a dense block mask."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks

DOCUMENTS, SHORTEST, LONGEST, HEADS, DIM = 32, 128, 1024, 8, 64
TITLE = (
    f"{DOCUMENTS} documents of {SHORTEST} to {LONGEST:,} tokens, {HEADS} heads of {DIM}, float32, forward + backward"
)
TITLE_ZH = (
    f"{DOCUMENTS} 篇文档，每篇 {SHORTEST} 到 {LONGEST:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32，前向 + 反向"
)
PADDED, DENSE = 1.6, 10.0

Results = tuple[Tensor, ...]


class Case(NamedTuple):
    """The same documents packed ``[1, heads, tokens, dim]``, and padded in a batch."""

    lengths: list[int]
    packed: list[Tensor]
    padded: list[Tensor]
    grads: tuple[Tensor, Tensor]
    is_token: Tensor
    """Bool ``[documents, longest]``."""
    dense: Tensor
    """Terms to add, 0 and -inf, ``[tokens, tokens]``."""

    def ours(self) -> Results:
        """Run this library on packed sequences."""
        out = sc.attention(*self.packed, masks.Documents(self.lengths))
        return out, *torch.autograd.grad(out, self.packed, self.grads[0])

    def blocks(self) -> Results:
        """Run SDPA on packed documents with a dense block mask."""
        out = F.scaled_dot_product_attention(*self.packed, attn_mask=self.dense)
        return out, *torch.autograd.grad(out, self.packed, self.grads[0])

    def rows(self) -> Results:
        """Run SDPA on a padded batch."""
        keys = self.is_token[:, None, None]
        out = F.scaled_dot_product_attention(*self.padded, attn_mask=keys)
        return out, *torch.autograd.grad(out, self.padded, self.grads[1])


def case(documents: int = DOCUMENTS, shortest: int = SHORTEST, longest: int = LONGEST) -> Case:
    """Return random lengths, including the longest, and random inputs."""
    torch.manual_seed(0)
    lengths = [*torch.randint(shortest, longest + 1, (documents - 1,)).tolist(), longest]
    is_token = torch.arange(longest) < torch.tensor(lengths)[:, None]
    padded = [torch.randn(documents, HEADS, longest, DIM) * is_token[:, None, :, None] for _ in range(4)]
    packed = [_packed(x, is_token) for x in padded]
    document = torch.arange(documents).repeat_interleave(torch.tensor(lengths))
    dense = torch.zeros(len(document), len(document)).masked_fill_(document[:, None] != document, -torch.inf)
    for x in (*packed[:3], *padded[:3]):
        x.requires_grad_()
    return Case(lengths, packed[:3], padded[:3], (packed[3], padded[3]), is_token, dense)


def _packed(x: Tensor, is_token: Tensor) -> Tensor:
    """Pack ``[documents, heads, longest, dim]`` into ``[1, heads, tokens, dim]``."""
    return x.transpose(1, 2)[is_token].transpose(0, 1)[None].contiguous()


def check(its: Case) -> None:
    """Check that all three agree at every token, gradients too."""
    for own, dense, padded in zip(its.ours(), its.blocks(), its.rows(), strict=True):
        assert_agree(own, dense)
        assert_agree(own, _packed(padded, its.is_token))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case()
    check(its)
    filled = len(its.dense) / its.is_token.numel()
    pair = compare(its.ours, its.rows, rounds=5, referee=referee)
    case_name, note = f"{len(its.dense):,} tokens, packed", f"{filled:.0%} of its rows are tokens"
    yield ratio_row(case_name, pair, peer="SDPA, padded", target=PADDED, note=note, but=lacking())
    pair = compare(its.ours, its.blocks, rounds=1, warm_up=0, referee=referee)  # half a minute each
    yield ratio_row(case_name, pair, peer="SDPA+mask", target=DENSE, but=lacking())
