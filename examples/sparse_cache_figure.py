"""The figure of ``sparse_cache_quality.py``: loss and recall against the budget, and each head's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from saccade.viz.fonts import covering_families

SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
TASKS = ("passkey", "MQAR", "induction")
INKS = ("#3b0f70", "#de4968", "#0f7a8a", "#c08a1e", "#fe9f6d", "#8c5fb0", "#5a6b2f")
HEIGHTS = (3.0, 0.6, 2.2)  # heights of the rows of the figure
CHINESE = {
    "blocks, mean": "选块，均值",
    "blocks, bound": "选块，上界",
    "blocks, best key": "选块，最佳键",
    "blocks, at random": "选块，随机",
    "sinks + window": "汇点与窗口",
    "heavy hitters": "HeavyHitter",
    "dense": "稠密",
    "loss at the next token, nats": "文本下一词元的损失，nat",
    "recall: accuracy, mean of three tasks": "召回：三项任务的平均正确率",
    "budget: tokens read or kept, %": "预算：读取或保留的词元，%",
    "where heads look: share of attention": "每个头看向哪里：注意力的份额",
    "layer.head of the language model": "语言模型的层.头",
    "sink": "汇点",
    "local": "附近",
    "anchor": "锚块",
    "rest": "其余",
}


def draw(
    rows: Sequence[dict[str, Any]],
    heads: Sequence[dict[str, Any]],
    path: Path,
    words: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Draw loss and recall against budget, and the mass of each head; ``words`` holds labels in another language."""
    from matplotlib import rc_context  # noqa: PLC0415  imported when used

    with rc_context({"font.family": covering_families("".join(words.values()))[0]}):
        _draw(rows, heads, path, lambda word: words.get(word, word))


def _draw(
    rows: Sequence[dict[str, Any]], heads: Sequence[dict[str, Any]], path: Path, say: Callable[[str], str]
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "recall"], ["names", "names"], ["heads", "heads"]], height_ratios=HEIGHTS)
    names = dict.fromkeys(row["policy"] for row in rows if row["policy"] != "dense")
    for name, ink, mark in zip(names, INKS, "os^vD*P", strict=False):
        own = [row for row in rows if row["policy"] == name]
        shares = [100 * row["share"] for row in own]
        recall = [sum(row[task]["accuracy"] for task in TASKS) / len(TASKS) for row in own]
        for panel, numbers in (("loss", [row["text"]["loss"] for row in own]), ("recall", recall)):
            panels[panel].plot(shares, numbers, marker=mark, color=ink, label=say(name), linewidth=1.6, markersize=5)
    dense = next(row for row in rows if row["policy"] == "dense")
    panels["loss"].axhline(dense["text"]["loss"], color="black", linewidth=0.8, linestyle="--", label=say("dense"))
    panels["names"].legend(
        *panels["loss"].get_legend_handles_labels(), loc="center", ncols=4, fontsize=9, frameon=False
    )
    panels["names"].set_axis_off()
    for panel, title in (("loss", "loss at the next token, nats"), ("recall", "recall: accuracy, mean of three tasks")):
        panels[panel].set_title(say(title), loc="left", size=11)
        panels[panel].set(xscale="log", xlabel=say("budget: tokens read or kept, %"))
        panels[panel].set_xticks([100 * share for share in SHARES], [f"{100 * share:g}" for share in SHARES])
        panels[panel].minorticks_off()
        panels[panel].grid(alpha=0.3)
    bars, below = panels["heads"], torch.zeros(len(heads))
    for part, ink in zip(("sink", "local", "anchor", "rest"), (INKS[0], INKS[2], INKS[4], "#d9d9e0"), strict=True):
        heights = torch.tensor([row[part] for row in heads])
        bars.bar(range(len(heads)), heights.tolist(), bottom=below.tolist(), label=say(part), color=ink)
        below = below + heights
    bars.set(xlabel=say("layer.head of the language model"), ylim=(0, 1), xlim=(-0.6, len(heads) - 0.4))
    bars.set_title(say("where heads look: share of attention"), loc="left", size=11)
    bars.set_xticks(range(len(heads)), [f"{row['layer']}.{row['head']}" for row in heads], fontsize=8)
    bars.legend(fontsize=9, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
