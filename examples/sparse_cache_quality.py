"""The loss of caches that read or store less than the dense one, at equal budgets. It takes minutes.

    python examples/sparse_cache_quality.py

decodes with one cache after another, at budgets from all tokens of a text down to 6 %. A single attention layer with
hand-written weights solves passkey, MQAR and induction: it stores each token under the name of the token before it, and
retrieves it by that name. With all keys every answer is right, so every error is caused by the cache. The context is
read at once and the question token by token, so no cache sees the question before it selects what to store. The bundled
language model reads held-out text with the same caches. The table has, for each cache, the share of the dense
attention's mass that was read, the loss of the next token, and the bytes stored and read. A second table shows where
the heads of the language model attend.

Writes ``quality.json`` and ``quality.png`` to ``--out``. The English text is that of the Python that runs this: the
shipped model learned from CPython 3.11.7, so run it with that for numbers on text not seen before.

Needs ``pip install 'saccade-attention[all]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from open_texts import blocks_of, english
from saccade import masks, models, tasks
from saccade.caches import (
    BlockSelectCache,
    Cache,
    HeavyHitterCache,
    KVCache,
    LayerCache,
    SinkWindowCache,
    SnapKVCache,
    Traffic,
)
from saccade.matrix import Matrix
from saccade.mechanisms import Softmax
from saccade.scorers import BlockBounds, BlockMeans, BlockScorer
from saccade.statistics import Parts
from sparse_cache_figure import CHINESE, SHARES, TASKS, draw

VOCAB = 300


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the comparison."""

    length: int = 256
    memory_dim: int = 64
    sharpness: float = 40.0
    examples: int = 64
    num_pairs: int = 32
    copied: int = 32
    key_len: int = 5
    texts: int = 16
    text_start: int = 128
    block_size: int = 4
    seed: int = 0


QUICK = Settings(length=64, examples=2, num_pairs=8, copied=8, texts=1, text_start=60)


class LargestKey(BlockScorer):
    """A scorer of blocks by their best key: an upper bound for rankings. It reads every key."""

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.masked_fill(~real, 0.0).flatten(3)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        keys = summary.unflatten(3, (-1, query.shape[2]))
        grouped = query.unflatten(1, (summary.shape[1], -1))
        return torch.einsum("bgrd,bgnsd->bgrns", grouped, keys).amax(-1).flatten(1, 2)


class RandomScorer(BlockScorer):
    """A scorer that ranks blocks at random: a lower bound for rankings."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.new_zeros(*key.shape[:3], 1)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return torch.rand(*query.shape[:2], summary.shape[2], generator=self._generator)


def policies(settings: Settings) -> dict[str, Callable[[int], LayerCache]]:
    """Return a cache for each budget, by name; the dense one is the same for all."""
    size, length = settings.block_size, settings.length

    def select(scorer: Callable[[], BlockScorer]) -> Callable[[int], LayerCache]:
        return lambda budget: BlockSelectCache(size, budget, scorer=scorer(), max_len=length)

    return {
        "dense": lambda _: KVCache(length),
        "blocks, mean": select(BlockMeans),
        "blocks, bound": select(BlockBounds),
        "blocks, best key": select(LargestKey),
        "blocks, at random": select(RandomScorer),
        "sinks + window": lambda budget: SinkWindowCache(size, budget - size),
        "heavy hitters": HeavyHitterCache,
        "SnapKV": lambda budget: SnapKVCache(budget, window=min(8, budget // 2)),
    }


class Listening:
    """A mechanism that stores the log-sum-exp of each row."""

    treats_heads_alike = True

    def __init__(self, mechanism: nn.Module):
        self._mechanism = mechanism
        self.logs: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, **how: Any) -> Matrix:
        matrix = self._mechanism(query, key, **how)
        self.logs.append(matrix.lse.flatten(1))
        return matrix


class Metered(LayerCache):
    """A cache beside a dense one, which measures the share of the dense attention's mass that its steps read."""

    def __init__(self, cache: LayerCache):
        self.cache, self.everything = cache, KVCache()
        self.mass: list[Tensor] = []

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    @property
    def traffic(self) -> Traffic:
        return self.cache.traffic

    def positions(self, q_len: int) -> Any:
        return self.cache.positions(q_len)

    def attend(self, mechanism: Any, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        part, whole = Listening(mechanism), Listening(mechanism)
        out = self.cache.attend(part, query, key, value, **how)
        self.everything.attend(whole, query, key, value, **how)
        if query.shape[2] == 1:
            some = torch.cat([one.flatten() for one in part.logs])
            self.mass.append((some - whole.logs[0].flatten()).exp().mean())
        return out

    def took(self, texts: int) -> dict[str, float]:
        """Return the mean share of mass that steps read, and the bytes stored and read by the last step, per text."""
        mass = float(torch.stack(self.mass).mean())
        return {"mass": mass, "bytes_held": self.nbytes / texts, "bytes_read": self.traffic.bytes_read / texts}

    def reorder(self, rows: Any) -> None:
        raise NotImplementedError

    def crop(self, length: int) -> None:
        raise NotImplementedError

    def fork(self) -> Self:
        raise NotImplementedError


@torch.no_grad()
def decode(
    model: models.Decoder, tokens: Tensor, context: int, make: Callable[[], LayerCache]
) -> tuple[Tensor, dict[str, float]]:
    """Return logits from the last token of the context on, ``[texts, n, vocab]``, and the costs."""
    layers = [Metered(make()) for _ in model.stack.layers]
    cache = Cache(layers)
    logits = [model(tokens[:, :context], cache=cache)[:, -1:]]
    for place in range(context, tokens.shape[1]):
        logits.append(model(tokens[:, place : place + 1], cache=cache))
    each = [layer.took(len(tokens)) for layer in layers]
    took = {"mass": sum(one["mass"] for one in each) / len(each)}
    took |= {name: sum(one[name] for one in each) for name in ("bytes_held", "bytes_read")}
    return torch.cat(logits, 1), took


class Memory:
    """One attention layer with hand-written weights: it returns the token after the last one of the same name.

    A token's vector is drawn once; its key is the vector of the token before it, its value its own, and a query is the
    vector of the token itself. Logits are products of the output with all vectors.
    """

    def __init__(self, settings: Settings):
        drawn = torch.randn(VOCAB, settings.memory_dim, generator=torch.Generator().manual_seed(settings.seed))
        self.vectors = F.normalize(drawn, dim=-1)
        self.mechanism = Softmax(scale=settings.sharpness)

    def decode(self, task: tasks.Recall, make: Callable[[], LayerCache]) -> tuple[Tensor, dict[str, float]]:
        """Return logits from the last token of the context on, ``[texts, n, vocab]``, and the costs."""
        own = self.vectors[task.tokens][:, None]
        before = F.pad(own, (0, 0, 1, 0))[:, :, :-1]
        cache, outs = Metered(make()), []
        for part in [slice(0, task.context_len), *(slice(i, i + 1) for i in range(task.context_len, own.shape[2]))]:
            query, key, value = own[:, :, part], before[:, :, part], own[:, :, part]
            out = cache.attend(self.mechanism, query, key, value, mask=masks.Causal())
            outs.append(out[:, 0, -1:] @ self.vectors.T)
        return torch.cat(outs, 1), cache.took(len(own))


def recall_tasks(settings: Settings) -> dict[str, tasks.Recall]:
    """Return one of each task."""
    sizes = {"vocab_size": VOCAB, "seed": settings.seed}
    return {
        "passkey": tasks.passkey(settings.examples, settings.length, key_len=settings.key_len, **sizes),
        "MQAR": tasks.mqar(settings.examples, settings.length, settings.num_pairs, **sizes),
        "induction": tasks.induction(settings.examples, settings.length, copied=settings.copied, **sizes),
    }


def held_out(settings: Settings) -> Tensor:
    """Return English text that the shipped model was not trained on, ``[texts, length]``."""
    limit = 40_000 if settings == QUICK else None
    _, blocks = blocks_of(english(), 4000, limit)
    tokenizer = models.small_decoder().tokenizer
    rows = [tokenizer.encode(block).ids for block in blocks]
    rows = [row[: settings.length] for row in rows if len(row) >= settings.length]
    step = max(1, len(rows) // settings.texts)
    return torch.tensor(rows[::step][: settings.texts])


def budget_of(share: float, settings: Settings) -> int:
    """Return tokens per key head, in whole blocks, at least three."""
    return max(3, round(share * settings.length / settings.block_size)) * settings.block_size


def measure(settings: Settings, console: Console) -> list[dict[str, Any]]:
    """Return a row for each policy, budget and text."""
    rows: list[dict[str, Any]] = []
    language, text = models.small_decoder(), held_out(settings)
    memory, made = Memory(settings), recall_tasks(settings)
    for name, make in policies(settings).items():
        for share in SHARES if name != "dense" else (1.0,):
            budget = budget_of(share, settings)
            row: dict[str, Any] = {"policy": name, "share": share, "budget": budget}
            for task_name, task in made.items():
                logits, took = memory.decode(task, lambda m=make, b=budget: m(b))
                row[task_name] = {"accuracy": task.accuracy(logits), **took}
            logits, took = decode(language, text, settings.text_start, lambda m=make, b=budget: m(b))
            told = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, settings.text_start :].flatten())
            row["text"] = {"loss": float(told), **took}
            rows.append(row)
            console.print(f"{name}, {share:.0%}: loss {row['text']['loss']:.3f}, mass {took['mass']:.3f}")
    return rows


@torch.no_grad()
def where_attention_goes(model: models.Decoder, tokens: Tensor, settings: Settings) -> list[dict[str, Any]]:
    """Return each head's mass at the beginning, nearby and elsewhere in the second half of texts, and the keys it
    needs.
    """
    rows = []
    half, size = tokens.shape[1] // 2, settings.block_size
    parts = Parts(sink=size, local=4 * size, anchor=4, block_size=size)
    for number, matrix in enumerate(model.matrices(tokens)):
        shares = matrix.compute(parts)[0][:, :, half:].double()
        weights = matrix.to_dense(limit=1 << 28)[:, :, half:].double()
        ordered = weights.sort(-1, descending=True).values.cumsum(-1)
        for head in range(weights.shape[1]):
            row = {"layer": number, "head": head}
            row |= dict(zip(("sink", "local", "anchor", "rest"), shares[:, head].unbind(-1), strict=True))
            for share in (0.5, 0.9, 0.99):
                row[f"keys_{share:g}"] = ((ordered[:, head] < share).sum(-1) + 1).double()
            rows.append({key: x.mean().item() if isinstance(x, Tensor) else x for key, x in row.items()})
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Format the rows for readers."""
    table = Table("policy", "budget", *TASKS, "text loss", "mass", "held", "read")
    for row in rows:
        text = row["text"]
        table.add_row(
            row["policy"],
            f"{row['share']:.1%}",
            *(f"{row[name]['accuracy']:.0%}" for name in TASKS),
            f"{text['loss']:.3f}",
            f"{text['mass']:.1%}",
            f"{text['bytes_held'] / 1024:.0f} KiB",
            f"{text['bytes_read'] / 1024:.0f} KiB",
        )
    return table


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/sparse_cache_quality"))
    parser.add_argument("--language", choices=("en", "zh"), default="en", help="of the figure (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run")
    given = parser.parse_args(arguments)
    settings, console = QUICK if given.quick else Settings(), Console()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = measure(settings, console)
    heads = where_attention_goes(models.small_decoder(), held_out(settings)[:8], settings)
    found = {
        "settings": dataclasses.asdict(settings),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rows": rows,
        "heads": heads,
    }
    (given.out / "quality.json").write_text(json.dumps(found, indent=1))
    draw(rows, heads, given.out / "quality.png", CHINESE if given.language == "zh" else {})
    console.print(as_table(rows))
    table = Table("layer.head", "sink", "local", "anchor", "rest", "keys for 50 %", "90 %", "99 %")
    for row in heads:
        shares = (f"{row[part]:.0%}" for part in ("sink", "local", "anchor", "rest"))
        keys = (f"{row[f'keys_{share:g}']:.0f}" for share in (0.5, 0.9, 0.99))
        table.add_row(f"{row['layer']}.{row['head']}", *shares, *keys)
    console.print(table)
    assert all(math.isfinite(row["text"]["loss"]) for row in rows)
    return found


if __name__ == "__main__":
    main()
