"""Two ways to translate: padding changes nothing, model 1 is its definition, and both learn."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "translate.py"
WORDS = {
    "ein": "a", "das": "the", "rot": "red", "haus": "house", "hund": "dog", "klein": "small", "gross": "big",
    "buch": "book",
}  # fmt: skip


def made(example, count=400):
    """German of eight words; English has the first two in the other order."""
    rng = np.random.default_rng(0)
    german = [" ".join(rng.choice(list(WORDS), rng.integers(2, 5))) for _ in range(count)]

    def english(text):
        first, second, *rest = (WORDS[word] for word in text.split())
        return " ".join([second, first, *rest])

    texts = list(dict.fromkeys(german))
    cut = len(texts) * 9 // 10
    told = [english(text) for text in texts]
    return example.Corpus(texts[:cut], told[:cut], texts[cut:], told[cut:])


def test_padding_changes_nothing(example):
    torch.manual_seed(0)
    models = [example.Recurrent(300, 8, 0.1).double().eval()]
    tokenizer = example.text_pairs.tokenizer_of(WORDS, 300)
    models.append(example.text_pairs.transformer(example.QUICK, tokenizer, 32).double().eval())
    sources, tokens = [[5, 6, 7, 8, 9], [10, 11]], torch.tensor([[0, 20, 21], [0, 22, 23]])
    places = example.padded_positions([5, 2])
    for model in models:
        together = model(example.text_pairs.padded(sources), tokens, source_positions=places)
        for row, source in enumerate(sources):
            own = torch.tensor([source])
            alone = model(own, tokens[row : row + 1], source_positions=example.padded_positions([len(source)]))
            torch.testing.assert_close(together[row], alone[0])


def test_the_likeliest_token_is_written(example):
    torch.manual_seed(0)
    model, sources = example.Recurrent(30, 8, 0.1).double().eval(), [[5, 6, 7, 8], [9], [10, 11, 12]]
    written = example.text_pairs.write(model, sources, 6)
    for source, own in zip(sources, written, strict=True):
        tokens = [example.text_pairs.START]
        while len(tokens) <= 6:
            given = model.given(torch.tensor([source]), source_positions=example.padded_positions([len(source)]))
            best = int(given(torch.tensor([tokens]))[0, -1].argmax())
            if best == example.text_pairs.END:
                break
            tokens.append(best)
        assert own == tokens[1:]


def test_model_1_is_its_definition(example):
    corpus = example.Corpus(["das haus", "das buch", "ein buch"], ["the house", "the book", "a book"], [], [])
    pairs = [(g.split(), e.split()) for g, e in zip(corpus.german, corpus.english, strict=True)]
    german, english = (sorted(set(itertools.chain(*side))) for side in zip(*pairs, strict=True))
    likely = np.ones((len(german), len(english)))
    for _ in range(5):
        counts = np.zeros_like(likely)
        for sources, targets in pairs:
            rows = [german.index(word) for word in sources]
            for word in targets:
                column = english.index(word)
                counts[rows, column] += likely[rows, column] / likely[rows, column].sum()
        likely = counts / counts.sum(1, keepdims=True)
    best = {word: english[int(likely[row].argmax())] for row, word in enumerate(german)}
    assert example.likeliest_words(corpus) == best == {"das": "the", "haus": "house", "buch": "book", "ein": "a"}


@pytest.mark.slow
def test_both_learn_an_order_that_words_alone_do_not_say(example, tmp_path, monkeypatch):
    settings = example.dataclasses.replace(
        example.QUICK, vocab_size=320, embed_dim=32, feed_forward_dim=32, recurrent_dim=32, steps=400, batch_size=32,
        learning_rate=1e-2, dropout_p=0.0,
    )  # fmt: skip
    monkeypatch.setattr(example, "QUICK", settings)
    arguments = ["--quick", "--out", str(tmp_path), "--text", "das rot haus"]
    rows = {row["who"]: row["mean"] for row in example.main(arguments, corpus=made(example))}
    assert rows["GRU with additive attention"] > 80
    assert rows["Transformer"] > 80
    assert rows["word by word"] < 60
    assert rows["the German text as it is"] < 5
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
