"""What is lost when a step reads less, or less is kept: caches beside the dense one, at the same budget. Minutes.

    python examples/sparse_cache_quality.py

trains a model of two layers to recall (passkey, MQAR, induction), and then decodes with one cache after another, at
budgets from all tokens of a text down to 6 %. The context is read at once; what asks comes token by token, so that no
cache sees the question before it has chosen what to keep. The language model that comes with saccade reads text that it
has not learned from, with the same caches. For each it is told how much of the dense attention's mass was read, how
well the next token is told, and which bytes are held and read. A second table and a figure say where attention goes.

Writes ``quality.json``, ``quality.png`` and the recall model to ``--out``. The English text is that of the Python that
runs this: the shipped model learned from CPython 3.11.7, so run it with that for numbers on text not seen before.

Needs ``pip install 'saccade[all]'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from saccade import models, tasks
from saccade.caches import (
    BlockScorer,
    BlockSelectCache,
    BoundScorer,
    Cache,
    HeavyHitterCache,
    KVCache,
    LayerCache,
    MeanScorer,
    SinkWindowCache,
    SnapKVCache,
    Traffic,
)
from saccade.matrix import Matrix

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
VOCAB = 300


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers."""

    length: int = 256
    embed_dim: int = 64
    steps: int = 3000
    tokens_per_step: int = 2048
    learning_rate: float = 3e-3
    examples: int = 64
    num_pairs: int = 32
    copied: int = 32
    key_len: int = 5
    texts: int = 24
    text_start: int = 64
    block_size: int = 4
    seed: int = 0


QUICK = Settings(
    length=64,
    embed_dim=16,
    steps=3,
    tokens_per_step=128,
    examples=2,
    num_pairs=8,
    copied=8,
    texts=1,
    text_start=56,
)


class LargestKey(BlockScorer):
    """Ranks blocks by their best key: what a ranking could know at most. It reads every key to do so."""

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.masked_fill(~real, 0.0).flatten(3)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        keys = summary.unflatten(3, (-1, query.shape[2]))
        grouped = query.unflatten(1, (summary.shape[1], -1))
        return torch.einsum("bgrd,bgnsd->bgrns", grouped, keys).amax(-1).flatten(1, 2)


class Lot(BlockScorer):
    """Ranks blocks by lot: what a ranking has to beat."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        return key.new_zeros(*key.shape[:3], 1)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return torch.rand(*query.shape[:2], summary.shape[2], generator=self._generator)


def policies(settings: Settings) -> dict[str, Callable[[int], LayerCache]]:
    """A cache for each budget, by name; the dense one is the same for all."""
    size, length = settings.block_size, settings.length

    def select(scorer: Callable[[], BlockScorer]) -> Callable[[int], LayerCache]:
        return lambda budget: BlockSelectCache(size, budget, scorer=scorer(), max_len=length)

    return {
        "dense": lambda _: KVCache(length),
        "blocks, mean": select(MeanScorer),
        "blocks, bound": select(BoundScorer),
        "blocks, best key": select(LargestKey),
        "blocks, by lot": select(Lot),
        "sinks + window": lambda budget: SinkWindowCache(size, budget - size),
        "heavy hitters": HeavyHitterCache,
        "SnapKV": lambda budget: SnapKVCache(budget, window=min(8, budget // 2)),
    }


class Listening:
    """A mechanism that remembers the logarithm of each row's denominator: what was read, in the same units as all."""

    score = bias = sink_logit = None

    def __init__(self, mechanism: nn.Module):
        self._mechanism = mechanism
        self.logs: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, **how: Any) -> Matrix:
        matrix = self._mechanism(query, key, **how)
        self.logs.append(matrix.lse.flatten(1))
        return matrix


class Metered(LayerCache):
    """A cache beside one that holds everything: which part of the dense attention's mass its steps read."""

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
    """Logits from the last token of the context on, ``[texts, n, vocab]``, and what it took."""
    layers = [Metered(make()) for _ in model.stack.layers]
    cache = Cache(layers)
    logits = [model(tokens[:, :context], cache=cache)[:, -1:]]
    for place in range(context, tokens.shape[1]):
        logits.append(model(tokens[:, place : place + 1], cache=cache))
    texts = len(tokens)
    took = {
        "mass": float(torch.stack([x for layer in layers for x in layer.mass]).mean()),
        "bytes_held": cache.nbytes / texts,
        "bytes_read": cache.traffic.bytes_read / texts,
    }
    return torch.cat(logits, 1), took


def recall_tasks(settings: Settings, seed: int, examples: int, length: int) -> dict[str, tasks.Recall]:
    """One of each; shorter texts hold fewer pairs."""
    pairs, copied = (max(2, n * length // settings.length) for n in (settings.num_pairs, settings.copied))
    return {
        "passkey": tasks.passkey(examples, length, key_len=settings.key_len, vocab_size=VOCAB, seed=3 * seed),
        "MQAR": tasks.mqar(examples, length, pairs, vocab_size=VOCAB, seed=3 * seed + 1),
        "induction": tasks.induction(examples, length, copied=copied, vocab_size=VOCAB, seed=3 * seed + 2),
    }


def train(settings: Settings, folder: Path, console: Console) -> models.Decoder:
    """A model that recalls; a finished one in the folder is taken as it is."""
    done = folder / "settings.json"
    about = json.dumps(dataclasses.asdict(settings))
    if done.is_file() and done.read_text() == about:
        return models.Decoder.from_pretrained(folder)
    torch.manual_seed(settings.seed)
    config = models.DecoderConfig(
        vocab_size=VOCAB,
        max_len=settings.length,
        embed_dim=settings.embed_dim,
        num_heads=4,
        num_kv_heads=2,
        num_layers=2,
        feed_forward_dim=2 * settings.embed_dim,
    )
    model = models.Decoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100, (settings.steps - step) / (0.3 * settings.steps))
    )
    start = time.perf_counter()
    for step in range(settings.steps):
        # Short texts first: what is learned there is needed at every length.
        shares = (4, 3, 2) if step < settings.steps // 2 else (4, 2, 1)
        length = settings.length // shares[step % 3]
        made = recall_tasks(settings, step, max(1, settings.tokens_per_step // length), length)
        tokens, targets = (torch.cat([getattr(own, name) for own in made.values()]) for name in ("tokens", "targets"))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=tasks.IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == settings.steps - 1:
            console.print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s")
    model.eval().save_pretrained(folder)
    done.write_text(about)
    return models.Decoder.from_pretrained(folder)


def held_out(settings: Settings) -> Tensor:
    """English text that the shipped model has not learned from, ``[texts, length]``."""
    import importlib.util  # noqa: PLC0415

    place = Path(__file__).with_name("train_language_model.py")
    spec = importlib.util.spec_from_file_location("train_language_model", place)
    assert spec is not None
    assert spec.loader is not None
    trainer = importlib.util.module_from_spec(spec)
    import sys  # noqa: PLC0415  dataclasses look their module up

    sys.modules[spec.name] = trainer
    spec.loader.exec_module(trainer)
    limit = 40_000 if settings == QUICK else None
    given = dataclasses.replace(trainer.Settings(), text_bytes=limit)
    _, blocks = trainer.blocks_of(trainer.english(), given)
    tokenizer = models.manuals().tokenizer
    rows = [tokenizer.encode(block).ids for block in blocks]
    rows = [row[: settings.length] for row in rows if len(row) >= settings.length]
    step = max(1, len(rows) // settings.texts)
    return torch.tensor(rows[::step][: settings.texts])


def budget_of(share: float, settings: Settings) -> int:
    """Tokens for each key head, in whole blocks, at least three."""
    return max(3, round(share * settings.length / settings.block_size)) * settings.block_size


def measure(settings: Settings, recall: models.Decoder, console: Console) -> list[dict[str, Any]]:
    """A row for each policy, budget and text."""
    rows: list[dict[str, Any]] = []
    language, text = models.manuals(), held_out(settings)
    made = recall_tasks(settings, 10**6, settings.examples, settings.length)
    for name, make in policies(settings).items():
        for share in SHARES if name != "dense" else (1.0,):
            budget = budget_of(share, settings)
            row: dict[str, Any] = {"policy": name, "share": share, "budget": budget}
            for task_name, task in made.items():
                logits, took = decode(recall, task.tokens, task.context_len, lambda m=make, b=budget: m(b))
                row[task_name] = {"accuracy": task.accuracy(logits), **took}
            logits, took = decode(language, text, settings.text_start, lambda m=make, b=budget: m(b))
            told = F.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, settings.text_start :].flatten())
            row["text"] = {"loss": float(told), **took}
            rows.append(row)
            console.print(f"{name}, {share:.0%}: loss {row['text']['loss']:.3f}, mass {took['mass']:.3f}")
    return rows


@torch.no_grad()
def where_attention_goes(model: models.Decoder, tokens: Tensor, settings: Settings) -> list[dict[str, Any]]:
    """For each head, over the second half of the texts: mass at the beginning, near by and elsewhere; keys needed."""
    rows = []
    half, near, first = tokens.shape[1] // 2, 4 * settings.block_size, settings.block_size
    for number, matrix in enumerate(model.matrices(tokens)):
        weights = matrix.to_dense(limit=1 << 28)[:, :, half:].double()
        q, kv = torch.arange(half, tokens.shape[1])[:, None], torch.arange(tokens.shape[1])
        sink = weights[..., :first].sum(-1)
        local = (weights * ((q - kv < near) & (kv >= first))).sum(-1)
        ordered = weights.sort(-1, descending=True).values.cumsum(-1)
        blocks = (weights * ((q - kv >= near) & (kv >= first))).unflatten(-1, (-1, settings.block_size)).sum(-1)
        anchors = blocks.sort(-1, descending=True).values[..., :4].sum(-1)
        for head in range(weights.shape[1]):
            row = {"layer": number, "head": head, "sink": sink[:, head], "local": local[:, head]}
            row |= {"anchor": anchors[:, head], "rest": 1 - sink[:, head] - local[:, head] - anchors[:, head]}
            for share in (0.5, 0.9, 0.99):
                row[f"keys_{share:g}"] = ((ordered[:, head] < share).sum(-1) + 1).double()
            rows.append({key: x.mean().item() if isinstance(x, Tensor) else x for key, x in row.items()})
    return rows


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """For a reader."""
    table = Table("policy", "budget", "passkey", "MQAR", "induction", "text loss", "mass", "held", "read")
    for row in rows:
        text = row["text"]
        table.add_row(
            row["policy"],
            f"{row['share']:.1%}",
            *(f"{row[name]['accuracy']:.0%}" for name in ("passkey", "MQAR", "induction")),
            f"{text['loss']:.3f}",
            f"{text['mass']:.1%}",
            f"{text['bytes_held'] / 1024:.0f} KiB",
            f"{text['bytes_read'] / 1024:.0f} KiB",
        )
    return table


def draw(rows: Sequence[dict[str, Any]], heads: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Loss and recall against budget, and where each head looks."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    dense = next(row for row in rows if row["policy"] == "dense")
    for name in dict.fromkeys(row["policy"] for row in rows if row["policy"] != "dense"):
        own = [row for row in rows if row["policy"] == name]
        shares = [100 * row["share"] for row in own]
        axes[0, 0].plot(shares, [row["text"]["loss"] for row in own], marker="o", label=name)
        recall = [sum(row[task]["accuracy"] for task in ("passkey", "MQAR", "induction")) / 3 for row in own]
        axes[0, 1].plot(shares, recall, marker="o", label=name)
    axes[0, 0].axhline(dense["text"]["loss"], color="black", linewidth=0.8)
    axes[0, 0].set(ylabel="loss at the next token of a text, in nats")
    axes[0, 1].set(ylabel="recall: mean accuracy of three tasks")
    for axis in axes[0]:
        axis.set(xscale="log", xlabel="budget: tokens read or kept, % of the text")
        axis.set_xticks([100 * share for share in SHARES], [f"{100 * share:g}" for share in SHARES])
        axis.minorticks_off()
    axes[0, 0].legend(fontsize=8)
    for axis, (name, own) in zip(axes[1], heads.items(), strict=True):
        below = torch.zeros(len(own))
        for part in ("sink", "local", "anchor", "rest"):
            heights = torch.tensor([row[part] for row in own])
            axis.bar(range(len(own)), heights.tolist(), bottom=below.tolist(), label=part)
            below = below + heights
        axis.set(ylabel="share of attention", title=name, xlabel="layer.head")
        labels = [f"{row['layer']}.{row['head']}" for row in own]
        axis.set_xticks(range(len(own)), labels, rotation=90, fontsize=7)
    axes[1, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, measure, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/sparse_cache_quality"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run")
    given = parser.parse_args(arguments)
    settings, console = QUICK if given.quick else Settings(), Console()
    given.out.mkdir(parents=True, exist_ok=True)
    recall = train(settings, given.out / "recall", console)
    rows = measure(settings, recall, console)
    made = recall_tasks(settings, 10**6, min(8, settings.examples), settings.length)
    heads = {
        "manuals, English text": where_attention_goes(models.manuals(), held_out(settings)[:8], settings),
        "recall model, MQAR": where_attention_goes(recall, made["MQAR"].tokens, settings),
    }
    found = {
        "settings": dataclasses.asdict(settings),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rows": rows,
        "heads": heads,
    }
    (given.out / "quality.json").write_text(json.dumps(found, indent=1))
    draw(rows, heads, given.out / "quality.png")
    console.print(as_table(rows))
    for name, own in heads.items():
        table = Table("layer.head", "sink", "local", "anchor", "rest", "keys for 50 %", "90 %", "99 %", title=name)
        for row in own:
            shares = (f"{row[part]:.0%}" for part in ("sink", "local", "anchor", "rest"))
            keys = (f"{row[f'keys_{share:g}']:.0f}" for share in (0.5, 0.9, 0.99))
            table.add_row(f"{row['layer']}.{row['head']}", *shares, *keys)
        console.print(table)
    assert all(math.isfinite(row["text"]["loss"]) for row in rows)
    return found


if __name__ == "__main__":
    main()
