"""Speed of a Longformer layer beside that of transformers, with the same projections.

Theirs has projections of its own for global tokens. They are compared twice: with weights copied from the others, where
ours is one mask and what theirs spends on the copies is taken off its time; and with weights of their own, where ours
makes the rows of global tokens from them as theirs does.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Pair, Referee, compare, in_turn
from benchmarks.reporting import Row, duration, ratio_row
from saccade import masks

N, HEADS, DIM, WIDTH = 8192, 8, 64, 256
TITLE = f"longformer layer: window ±{WIDTH}, token 0 global, n={N}, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"Longformer 层：窗口 ±{WIDTH}，全局词元 0，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32"
TARGET, WITHOUT_WHEEL = 8.0, 5.0


class Layers(nn.Module):
    """The layer of transformers and ours with the same weights; token 0 is global."""

    def __init__(self, n: int = N, width: int = WIDTH, *, own_globals: bool = False):
        super().__init__()
        torch.manual_seed(0)
        embed_dim = HEADS * DIM
        config = LongformerConfig(
            hidden_size=embed_dim,
            num_attention_heads=HEADS,
            attention_window=[2 * width],
            attention_probs_dropout_prob=0.0,
        )
        self.layer = LongformerSelfAttention(config, 0).eval()
        self.own_globals = own_globals
        if not own_globals:
            for name in ("query", "key", "value"):
                getattr(self.layer, f"{name}_global").load_state_dict(getattr(self.layer, name).state_dict())
        self.hidden = torch.randn(1, n, embed_dim)
        is_global = torch.zeros(1, n, dtype=torch.bool)
        is_global[:, 0] = True
        self.facts = {
            "attention_mask": torch.where(is_global, 10000.0, 0.0),  # > 0 marks a global token
            "is_index_masked": torch.zeros_like(is_global),
            "is_index_global_attn": is_global,
            "is_global_attn": True,
        }
        self.mask = masks.longformer(width, [0])
        self.seen_only = masks.Window(width, width) | masks.Global([0], sees=False)

    def theirs(self) -> Tensor:
        """Run the layer of transformers."""
        return self.layer(self.hidden, **self.facts)[0]

    def ours(self) -> Tensor:
        """Run our layer: three projections and one product; with global projections, three more and row 0 again."""
        query, key, value = self._projected("")
        if not self.own_globals:
            return sc.attention(query, key, value, self.mask).transpose(1, 2).flatten(2)
        out = sc.attention(query, key, value, self.seen_only)
        query, key, value = self._projected("_global", first_only=True)
        out[:, :, :1] = sc.attention(query, key, value)
        return out.transpose(1, 2).flatten(2)

    def redundant(self) -> list[Tensor]:
        """Run the global projections, which transformers always runs (query: for token 0)."""
        return self._projected("_global", first_only=True)

    def _projected(self, suffix: str, *, first_only: bool = False) -> list[Tensor]:
        sources = (self.hidden[:, :1] if first_only else self.hidden, self.hidden, self.hidden)
        linears = [getattr(self.layer, name + suffix) for name in ("query", "key", "value")]
        return [
            F.linear(x, linear.weight, linear.bias).unflatten(2, (HEADS, DIM)).transpose(1, 2)
            for x, linear in zip(sources, linears, strict=True)
        ]


def check(layers: Layers) -> None:
    """Check that both layers return the same output."""
    with torch.no_grad():
        assert_agree(layers.ours(), layers.theirs())


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for own in (False, True):
        layers = Layers(own_globals=own)
        check(layers)
        with torch.no_grad():
            pair = compare(layers.ours, layers.theirs, rounds=5, referee=referee)
            extra = 0.0 if own else in_turn([layers.redundant], rounds=3, referee=referee).median(0)
        if own:
            yield ratio_row("global projections of their own", pair, peer="transformers")
            continue
        yield _less(extra, pair, "global projections copied", TARGET, lacking())
        with torch.no_grad(), no_wheel():
            pair = compare(layers.ours, layers.theirs, rounds=5, referee=referee)
        yield _less(extra, pair, "global projections copied, without the wheel", WITHOUT_WHEEL, "")


def _less(extra: float, pair: Pair, case: str, target: float, but: str) -> Row:
    ratio = pair.ratio * (pair.theirs - extra) / pair.theirs
    note = f"less {duration(extra)} of copied projections"
    row = ratio_row(case, pair._replace(ratio=ratio), peer="transformers", target=target, note=note, but=but)
    return row._replace(figures=row.figures | {"redundant_s": extra})
