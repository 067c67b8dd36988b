"""Training of small layers: several heads against one, many examples against few."""

from __future__ import annotations

from collections.abc import Callable

import torch

from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal
from saccade.theory.trained import Layer, Task, attentive, convolution, learned, neighbours, recall, triples


@claim(
    latex=r"\mathrm{loss}(h\ \text{heads})<\mathrm{loss}(1\ \text{head})",
    source="tutorials, by experience; Vaswani et al. 2017, arXiv:1706.03762, table 3, row A, where both 1 and 32 heads "
    "are worse than 8; for thin heads Bhojanapalli et al. 2020, arXiv:2002.07028",
    verdict="holds if",
    conditions="the needed tokens are at several positions at once: two or four heads identify two neighbours, one "
    "head never does. To find one position among many, a wide head is better than narrow ones of the same total width",
)
def several_heads_beat_one(draw: Draw, *, layer: Callable[[int], Layer] = attentive) -> Measurements:
    """Several heads do better than one of the same total width."""

    def accuracy(heads: int, task: Task, width: int, rate: float, steps: int) -> torch.Tensor:
        return learned(layer(heads), task, width=width, rate=rate, steps=steps).accuracy

    both = neighbours(1, 2)
    one, four = (accuracy(heads, both, 32, 0.01, 200) for heads in (1, 4))
    yield at_most("both neighbours, one head of 32: accuracy, best of 4 seeds", float(one.max()), 0.75)
    yield at_least("both neighbours, four heads of 8: accuracy, worst of 4 seeds", float(four.min()), 0.95)
    wide, thin = (accuracy(heads, recall(), 16, 0.03, 400) for heads in (1, 8))
    yield at_least("one of 16 keys, one head of 16: accuracy, worst of 4 seeds", float(wide.min()), 0.95)
    yield at_most("one of 16 keys, eight heads of 2: accuracy, best of 4 seeds", float(thin.max()), 0.85)


@claim(
    latex=r"\mathrm{Var}_{\text{seed}}(h\ \text{heads})<\mathrm{Var}_{\text{seed}}(1\ \text{head})",
    source="tutorials",
    verdict="holds if",
    conditions="the learning rate is so high that one head no longer learns: more of the seeds survive with eight. "
    "At a third of that rate all seeds learn either way, and there is nothing to steady",
)
def several_heads_train_more_steadily(draw: Draw, *, layer: Callable[[int], Layer] = attentive) -> Measurements:
    """Several heads make training steadier."""

    def that_learn(heads: int, rate: float) -> int:
        found = learned(layer(heads), neighbours(1), steps=200, rate=rate, seeds=8).accuracy
        return int((found > 0.9).sum())

    yield equal("rate 0.03, one head: of 8 seeds, how many learn", that_learn(1, 0.03), 8)
    yield equal("rate 0.03, eight heads: of 8 seeds, how many learn", that_learn(8, 0.03), 8)
    yield at_least("rate 0.1: how many more with eight heads", that_learn(8, 0.1) - that_learn(1, 0.1), 3)


@claim(
    latex=r"N_{\text{attention}}\gg N_{\text{convolution}}",
    source="tutorials; Dosovitskiy et al. 2021, arXiv:2010.11929, section 4.3, for images",
    verdict="holds if",
    conditions="the task depends on neighbours, which a convolution reads from the start. If it depends on tokens "
    "anywhere, attention learns from examples from which a convolution learns nothing",
)
def attention_needs_much_data(
    draw: Draw, *, layer: Callable[[int], Layer] = attentive, other: Layer = convolution
) -> Measurements:
    """Attention needs many examples, more than other networks do."""

    def near(layer: Layer, examples: int) -> float:
        found = learned(layer, triples(), steps=400, rate=0.01, examples=examples, activation=torch.relu)
        return float(found.accuracy.mean())

    def far(layer: Layer, examples: int) -> float:
        return float(learned(layer, recall(), steps=400, rate=0.01, examples=examples).accuracy.mean())

    few = near(other, 512)
    yield at_least("triples, a convolution: accuracy from 512 examples", few, 0.65)
    yield at_most("triples, attention: accuracy from 512 examples", near(layer(4), 512), 0.45)
    yield at_most(
        "triples, attention: accuracy from 4,096, against the convolution's from 512", near(layer(4), 4096) - few, -0.1
    )
    yield at_least("recall, attention: accuracy from 512 examples", far(layer(1), 512), 0.6)
    yield apart("recall, a convolution from 4,096: accuracy, against attention's", far(other, 4096), 1.0, 0.7)
