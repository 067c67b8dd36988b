"""Speed of a BigBird layer beside that of transformers, per visible pair.

The layer of transformers draws random blocks only in training, and different ones, so outputs cannot be compared: each
side is checked against its dense mask. Our random blocks may overlap the window, theirs do not; the ratio is therefore
per pair. Their layer always returns a dense matrix of weights, so the time to fill one with zeros is measured, too.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Referee, compare, in_turn
from benchmarks.reporting import Row, ratio_row
from saccade import masks

N, HEADS, DIM, BLOCK, RANDOM = 4096, 8, 64, 64, 3
TARGETS = {"forward": 6.0, "forward, without the wheel": 2.0}
TITLE = f"bigbird layer: blocks of {BLOCK}, {RANDOM} random, n={N}, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"BigBird 层：块大小 {BLOCK}，随机块 {RANDOM} 个，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32"


class Layers(nn.Module):
    """The layer of transformers and ours with the same weights."""

    def __init__(self, n: int = N, block: int = BLOCK):
        super().__init__()
        torch.manual_seed(0)
        embed_dim = HEADS * DIM
        config = BigBirdConfig(
            hidden_size=embed_dim,
            num_attention_heads=HEADS,
            block_size=block,
            num_random_blocks=RANDOM,
            max_position_embeddings=n,
            attention_probs_dropout_prob=0.0,
        )
        self.layer = BigBirdBlockSparseAttention(config, seed=0).train()
        self.hidden = torch.randn(1, n, embed_dim)
        blocked, band, start, stop = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, n), block)
        self.facts = {
            "band_mask": band,
            "from_mask": start,
            "to_mask": stop,
            "from_blocked_mask": blocked,
            "to_blocked_mask": blocked,
        }
        self.mask = masks.bigbird(block, random_blocks=RANDOM)

    def theirs(self) -> Tensor:
        """Run the layer of transformers."""
        return self.layer(self.hidden, **self.facts)[0]

    def ours(self) -> Tensor:
        """Run our layer: three projections and one product."""
        return sc.attention(*self.projected(), self.mask).transpose(1, 2).flatten(2)

    def projected(self) -> list[Tensor]:
        """Return the projected query, key and value."""
        linears = (self.layer.query, self.layer.key, self.layer.value)
        return [linear(self.hidden).unflatten(2, (HEADS, DIM)).transpose(1, 2) for linear in linears]

    def their_mask(self) -> Tensor:
        """Return the mask of transformers, read off its weights: bool ``[1, heads, n, n]``."""
        return self.layer(self.hidden, **self.facts)[1] > 0


def check(layers: Layers) -> tuple[int, int]:
    """Check each side against its dense mask; return the visible pairs of ours and theirs, over all heads."""
    with torch.no_grad():
        projected = layers.projected()
        n = layers.hidden.shape[1]
        ours, theirs = layers.mask.to_dense(n), layers.their_mask()
        for out, mask in ((layers.ours(), ours), (layers.theirs(), theirs)):
            dense = F.scaled_dot_product_attention(*projected, attn_mask=mask)
            assert_agree(out, dense.transpose(1, 2).flatten(2))
    layers.train(False)
    assert torch.equal(layers.mask.to_dense(n), ours), "the same mask in training and evaluation"
    layers.train(True)
    return int(ours.sum()) * HEADS, int(theirs.sum())


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    layers = Layers()
    own, other = check(layers)

    def blank() -> torch.Tensor:
        return torch.zeros(1, HEADS, N, N).fill_(0.0)  # which also touches the pages

    with torch.no_grad():
        written = in_turn([blank], rounds=3, referee=referee).median(0)
        for case, target in TARGETS.items():
            is_whole = case == "forward"
            with nullcontext() if is_whole else no_wheel():
                pair = compare(layers.ours, layers.theirs, rounds=7, referee=referee)
            ratio = pair.ratio * own / other
            note = f"{own / other:.0%} of its pairs; without its n² zeros {ratio * (1 - written / pair.theirs):.1f}x"
            pair = pair._replace(ratio=ratio)
            but = lacking() if is_whole else ""
            row = ratio_row(case, pair, peer="transformers", target=target, note=note, but=but)
            yield row._replace(figures=row.figures | {"pairs": own, "their_pairs": other, "zeros_s": written})
