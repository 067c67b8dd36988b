"""The example runs in seconds, and what it measures is what it says."""

import json
from pathlib import Path

import pytest
import torch

from saccade.caches import BlockSelectCache, KVCache, SinkWindowCache
from saccade.masks import Causal
from saccade.mechanisms import Softmax

PATH = Path(__file__).parents[3] / "examples" / "sparse_cache_quality.py"


@pytest.mark.slow
def test_it_runs(example, tmp_path):
    found = example.main(["--quick", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "quality.json").read_text())["rows"] == found["rows"]
    assert (tmp_path / "quality.png").stat().st_size > 1000
    by_name = {(row["policy"], row["share"]): row for row in found["rows"]}
    dense = by_name["dense", 1.0]
    for name in example.policies(example.QUICK):
        full = by_name[name, 1.0]
        for task in example.TASKS:
            assert full[task]["accuracy"] == dense[task]["accuracy"] == 1.0
        assert full["text"]["loss"] == pytest.approx(dense["text"]["loss"], abs=1e-5)
    for head in found["heads"]:
        assert sum(head[part] for part in ("sink", "local", "anchor", "rest")) == pytest.approx(1)


def test_mass_is_the_share_of_the_dense_weights_that_was_read(example):
    x = torch.randn(2, 2, 20, 8).double()
    for cache in (SinkWindowCache(2, 5), BlockSelectCache(2, 8, sink_blocks=0, local_blocks=1), KVCache()):
        metered = example.Metered(cache)
        metered.attend(Softmax(), *[x[:, :, :19]] * 3, mask=Causal())
        metered.attend(Softmax(), *[x[:, :, 19:]] * 3, mask=Causal())
        weights = (x[:, :, 19:] @ x.mT * 8**-0.5).softmax(-1)
        if isinstance(cache, SinkWindowCache):
            expected = weights[..., [0, 1, *range(15, 20)]].sum(-1).mean()
        elif isinstance(cache, BlockSelectCache):
            expected = metered.mass[0]
            assert 0.3 < float(expected) < 1
        else:
            expected = torch.ones(()).double()
        torch.testing.assert_close(metered.mass[0], expected)


def test_the_memory_answers_everything_and_forgets_what_is_let_go(example):
    memory, made = example.Memory(example.QUICK), example.recall_tasks(example.QUICK)
    for task in made.values():
        logits, took = memory.decode(task, KVCache)
        assert task.accuracy(logits) == 1.0
        assert took["mass"] == pytest.approx(1)
    logits, took = memory.decode(made["induction"], lambda: SinkWindowCache(1, 3))
    assert made["induction"].accuracy(logits) < 0.5
    assert took["bytes_held"] == 4 * 2 * 64 * 4 + 4 * 8 / 2
