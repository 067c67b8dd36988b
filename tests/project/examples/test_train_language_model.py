"""The example runs in seconds, goes on where it was stopped, and its 5-gram and its losses are what they say."""

import collections
import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from saccade.models import Decoder, DecoderConfig

PATH = Path(__file__).parents[3] / "examples" / "train_language_model.py"
STORY = """_分节阅读_1
 自序
 ------
 　　我看见①一只猫。
 　　猫（⒈）走了。
 　□ 注释
 ①猫：一种动物。
 ------
 狗
<!--
网
-->
"""


@pytest.fixture
def chinese(example, monkeypatch):
    """A source of made text, which needs no network."""
    pages = ["".join(chr(0x4E00 + (number * 37 + i * i) % 400) for i in range(300)) for number in range(30)]
    monkeypatch.setattr(example, "chinese", lambda: example.Source("Chinese", "made", "none", pages))


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_ends_the_same(example, chinese, monkeypatch, tmp_path, capsys):
    arguments = ["--quick", "--out"]
    whole = example.main([*arguments, str(tmp_path / "whole")])
    save = example.Run._save

    def stop(run):
        save(run)
        if run.step == 10:
            raise KeyboardInterrupt("after a checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(example.Run, "_save", stop)
        with pytest.raises(KeyboardInterrupt, match="after a checkpoint"):
            example.main([*arguments, str(tmp_path / "stopped")])
    trained = []
    step = example.Run._learn
    monkeypatch.setattr(example.Run, "_learn", lambda run: trained.append(run.step) or step(run))
    resumed = example.main([*arguments, str(tmp_path / "stopped")])
    assert trained == list(range(10, 20))
    assert resumed["held_out"] == whole["held_out"]
    one, other = (Decoder.from_pretrained(tmp_path / name / "model") for name in ("whole", "stopped"))
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])

    # Nothing is left to train, and nothing half-written is left behind.
    trained.clear()
    assert example.main([*arguments, str(tmp_path / "stopped")])["held_out"] == whole["held_out"]
    assert trained == []
    assert not list(tmp_path.rglob("*.part"))

    # The written, returned and printed results are the same.
    assert json.loads((tmp_path / "whole" / "card.json").read_text(encoding="utf-8")) == json.loads(json.dumps(whole))
    assert (tmp_path / "whole" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert [text["language"] for text in whole["texts"]] == ["English", "Chinese"]
    assert [text["licence"].partition(",")[0] for text in whole["texts"]] == ["PSF-2.0", "none"]
    printed = capsys.readouterr().out
    for row in whole["held_out"]:
        assert f"{row['5-gram']['bits_per_byte']:.3f}" in printed
    assert one.tokenizer.decode(one.tokenizer.encode("Aß 汉字\n").ids) == "Aß 汉字\n"

    # A checkpoint of other settings is not used.
    monkeypatch.setattr(example, "QUICK", dataclasses.replace(example.QUICK, steps=1))
    example.main([*arguments, str(tmp_path / "stopped")])
    assert trained == [0]
    assert "start over" in " ".join(capsys.readouterr().out.split())


def test_training_learns(example, tmp_path):
    settings = dataclasses.replace(example.QUICK, steps=80, learning_rate=1e-2, matrix_rate=0.02)
    torch.set_num_threads(1)
    texts = example.read([example.english()], settings)
    run = example.Run(settings, texts.tokenizer, texts.languages(), tmp_path)
    run.train()
    losses = [loss for _, loss, _ in run.notes]
    assert losses[-1] < losses[0] - 1
    assert len(losses) == settings.steps // settings.save_every


def test_stories_are_read_without_the_notes_of_a_later_edition(example):
    import open_texts  # noqa: PLC0415  found beside the example

    assert open_texts.lines_of(open_texts.without_notes(STORY)) == "自序\n\n我看见一只猫。\n\n猫走了。\n\n狗"


def test_nothing_that_is_held_out_is_learned(example):
    learn, held_out = example.blocks_of(example.english(), example.QUICK.block_bytes, 100_000)
    assert len(held_out) == pytest.approx(len(learn) / 9, abs=1)
    known = {" ".join(p.split()) for block in learn for p in block.split("\n\n")}
    hidden = [" ".join(p.split()) for block in held_out for p in block.split("\n\n")]
    assert hidden
    assert known.isdisjoint(hidden)


def test_the_5_gram_is_a_distribution_and_its_definition(example):
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randint(1, 6, (40,), generator=generator).tolist() for _ in range(30)]
    held_out = [torch.randint(1, 7, (20,), generator=generator).tolist()]
    model = example.NGram(blocks, order=3, vocab_size=7, end=0)
    histories = list(itertools.product(range(7), repeat=2))
    for history in histories:
        assert sum(model.probability(history, token) for token in range(7)) == pytest.approx(1)

    # Counts by their definition: of the longest histories how often, of shorter ones in how many contexts.
    occurrences = collections.Counter()
    for block in blocks:
        padded = [0, 0, *block, 0]
        occurrences.update(tuple(padded[i - 2 : i + 1]) for i in range(2, len(padded)))
    counts = {3: dict(occurrences)}
    for size in (2, 1):
        counts[size] = dict(collections.Counter(gram[1:] for gram in counts[size + 1]))

    def discounts(size):
        n = collections.Counter(counts[size].values())
        y = n[1] / (n[1] + 2 * n[2]) if n[1] else 0
        if not (n[1] and n[2] and n[3]):
            return (0, 0.5, 1.0, 1.5)
        found = [c - (c + 1) * y * n[c + 1] / n[c] for c in (1, 2, 3)]
        return (0, *(d if 0 < d < c else c / 2 for c, d in zip((1, 2, 3), found, strict=True)))

    def probability(history, token):
        lower = probability(history[1:], token) if history else 1 / 7
        size = len(history) + 1
        own = {gram[-1]: c for gram, c in counts[size].items() if gram[:-1] == history}
        if not own:
            return lower
        taken = discounts(size)
        left = sum(taken[min(c, 3)] for c in own.values()) / sum(own.values())
        return max(own.get(token, 0) - taken[min(own.get(token, 0), 3)], 0) / sum(own.values()) + left * lower

    for history in histories:
        for token in range(7):
            assert model.probability(history, token) == pytest.approx(probability(history, token))
    padded = [0, 0, *held_out[0], 0]
    expected = -sum(math.log(probability(tuple(padded[i - 2 : i]), padded[i])) for i in range(2, len(padded)))
    assert model.nats(held_out) == pytest.approx(expected)


def test_losses_count_every_held_out_token_once(example):
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_len": 8, "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feed_forward_dim": 8}
    model = Decoder(DecoderConfig(**sizes, end_tokens=(0,))).double()
    settings = dataclasses.replace(example.QUICK, max_len=8)
    generator = torch.Generator().manual_seed(1)
    for length in (0, 1, 7, 8, 9, 12, 30):
        block = torch.randint(1, 9, (length,), generator=generator).tolist()
        tokens = torch.tensor([0, *block, 0])
        expected = 0.0
        for index in range(1, len(tokens)):
            # The first 8 are read from the start, the others in windows that go on by 5 and look back by 4.
            start = 0 if index <= 8 else 5 + (index - 9) // 5 * 5
            logits = model(tokens[None, start:index])[0, -1]
            expected += F.cross_entropy(logits, tokens[index]).item()
        assert example.held_out_nats(model, [block], settings) == pytest.approx(expected, rel=1e-6)
        torch.nn.init.zeros_(model.embedding.weight)  # all tokens are alike: each counts ln 9
        found = example.held_out_nats(model, [block], settings)
        assert found == pytest.approx((length + 1) * math.log(9), rel=1e-6)
        torch.nn.init.normal_(model.embedding.weight)
