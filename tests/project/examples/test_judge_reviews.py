"""A whole encoder judges reviews; padding changes nothing, and it learns."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from saccade.models import Encoder, EncoderConfig

PATH = Path(__file__).parents[3] / "examples" / "judge_reviews.py"


def small():
    """An encoder that knows eight characters."""
    known = {token: number for number, token in enumerate(["[PAD]", "[UNK]", *"好坏天地人山水火"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    sizes = {"max_len": 64, "embed_dim": 16, "num_heads": 2, "num_layers": 2, "feed_forward_dim": 32}
    torch.manual_seed(0)
    return Encoder(EncoderConfig(vocab_size=len(known), **sizes, dropout_p=0.0, attention_dropout_p=0.0), tokenizer)


def made(language):
    """好 before 坏 is for, after it is against; the other characters say nothing."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(600):
        words = list(rng.choice(list("天地人山水火"), 6))
        first, second = sorted(rng.choice(6, 2, replace=False))
        is_for = bool(rng.integers(2))
        words[first], words[second] = ("好", "坏") if is_for else ("坏", "好")
        found.append(("".join(words), is_for))
    return found


def test_padding_changes_nothing(example):
    judge = example.Judge(small(), 0.2).double().eval()
    texts = [list("好坏"), list("天地人山水"), list("火")]
    together = judge(*example.batch(judge.encoder, texts))
    alone = torch.cat([judge(*example.batch(judge.encoder, [text])) for text in texts])
    torch.testing.assert_close(together, alone)


@pytest.mark.slow
def test_it_learns(example, tmp_path, monkeypatch):
    settings = example.dataclasses.replace(
        example.QUICK, steps=300, batch_size=32, learning_rate=5e-3, warm_up=30, dropout_p=0.0
    )
    monkeypatch.setattr(example, "QUICK", settings)
    rows = {row["who"]: row["mean"] for row in example.main(["--quick", "--out", str(tmp_path)], made, small)}
    assert rows["Chinese: the same from random weights"] > 0.9
    assert rows["Chinese: the more frequent answer"] < 0.7
