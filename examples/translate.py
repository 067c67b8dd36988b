"""German to English from Debian's package descriptions: a Transformer, and a GRU with additive attention.

    python examples/translate.py

Maintainers described packages in English, and volunteers translated 13,000 of the descriptions into German: lines and
paragraphs, of which those of at most 12 words are used. One package family in ten is held out, and no
German text of the test occurs in training. An encoder-decoder (Vaswani et al. 2017) and a GRU that reads in both
directions, with another that writes and looks back with Bahdanau's score (2015; where it looks, as Luong et al. 2015,
section 3.1), of about equal size, learn for the same number of steps. Baselines: word by word with the most likely
word of IBM's model 1 (Brown et al. 1993), and the German text as it is. Prints BLEU and chrF of what is written for
600 held-out texts (sacrebleu), and draws what the words of a translation attend to in both models. The Transformer is
written as a folder, in which

    saccade look --model out/translation/model "Ein Spiel" --to "a game"

looks. Interrupted runs resume. Needs Debian's apt-get, and ``pip install 'saccade-attention[all]' sacrebleu``.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn

import package_descriptions
import study
import text_pairs
from saccade import AttentionMatrix, masks, models, scores, viz
from saccade.caches import padded_positions


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    vocab_size: int = 4000
    embed_dim: int = 128
    num_heads: int = 4
    num_layers: int = 2
    feed_forward_dim: int = 256
    recurrent_dim: int = 144
    dropout_p: float = 0.1
    most_words: int = 12
    longest: int = 36
    steps: int = 1200
    batch_size: int = 48
    matrix_rate: float = 0.02
    learning_rate: float = 5e-3
    tested: int = 600


QUICK = Settings(
    vocab_size=400, embed_dim=16, num_heads=2, feed_forward_dim=16, recurrent_dim=16, steps=20, warm_up=2, tested=20,
    seeds=(0,),
)  # fmt: skip


class Corpus(NamedTuple):
    """German and English texts, for training and for testing."""

    german: list[str]
    english: list[str]
    held_out_german: list[str]
    held_out_english: list[str]


def load(settings: Settings) -> Corpus:
    """Load lines and paragraphs that correspond in both languages; none of the test is in training."""
    both = package_descriptions.pairs(package_descriptions.descriptions(), "de")
    train: dict[str, str] = {}
    test: dict[str, str] = {}
    for english, german in both:
        if len(english.paragraphs) == len(german.paragraphs):
            texts = zip((german.summary, *german.paragraphs), (english.summary, *english.paragraphs), strict=True)
            own = test if english.is_held_out else train
            own |= {g: e for g, e in texts if max(len(g.split()), len(e.split())) <= settings.most_words}
    known, answers = set(train), set(train.values())
    left = [(german, english) for german, english in test.items() if german not in known and english not in answers]
    order = np.random.default_rng(0).permutation(len(left))[: settings.tested]
    return Corpus([*train], [*train.values()], [left[i][0] for i in order], [left[i][1] for i in order])


class Recurrent(nn.Module):
    """A bidirectional GRU, a GRU decoder, and additive attention between them.

    The second GRU does not read the attention's output, so a known text needs one call only.
    """

    def __init__(self, vocab_size: int, dim: int, dropout_p: float):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.reader = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)
        self.writer = nn.GRU(dim, dim, batch_first=True)
        self.score = scores.Additive(dim, dim, dim)
        self.join = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, source: Tensor, tokens: Tensor, *, source_positions: Tensor) -> Tensor:
        """Return logits ``[batch, len, vocab_size]``; arguments as in `saccade.models.EncoderDecoder`."""
        return self.given(source, source_positions=source_positions)(tokens)

    def given(self, source: Tensor, *, source_positions: Tensor) -> Written:
        """Encode a batch of sources once; return a language model of the targets."""
        lengths = (source_positions >= 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(self.embedding(source)), lengths, batch_first=True, enforce_sorted=False
        )
        read, _ = self.reader(packed)
        encoded, _ = nn.utils.rnn.pad_packed_sequence(read, batch_first=True, total_length=source.shape[1])
        return Written(self, encoded, masks.Padding(lengths.tolist()))


class Written(nn.Module):
    """A `Recurrent` with an encoded source: a language model for `saccade.models.generate`."""

    def __init__(self, model: Recurrent, encoded: Tensor, mask: masks.Mask):
        super().__init__()
        self.model, self.encoded, self.mask = model, encoded, mask

    def matrix(self, tokens: Tensor) -> tuple[AttentionMatrix, Tensor]:
        """Return the attention of each token, ``[batch, 1, len, source_len]``, and the states of the decoder."""
        state, _ = self.model.writer(self.model.dropout(self.model.embedding(tokens)))
        query, key = state[:, None], self.encoded[:, None]
        return AttentionMatrix(query, key, self.mask, score=self.model.score), state

    def forward(self, tokens: Tensor, *, positions: object = None) -> Tensor:
        """Return logits ``[batch, len, vocab_size]`` of the next token; positions are implied by the state."""
        matrix, state = self.matrix(tokens)
        seen = (matrix @ self.encoded[:, None])[:, 0]
        joined = torch.tanh(self.model.join(torch.cat([state, seen], -1)))
        return self.model.dropout(joined) @ self.model.embedding.weight.T * math.sqrt(self.model.dim)


def runs_of(corpus: Corpus, tokenizer: Tokenizer, settings: Settings, out: Path) -> dict[str, list[study.Run]]:
    """Return all seeds of both models."""
    length = settings.longest
    pairs = text_pairs.pairs_of(tokenizer, corpus.german, corpus.english, length, length)
    size = tokenizer.get_vocab_size()
    makers = {
        "transformer": lambda: text_pairs.transformer(settings, tokenizer, 2 * settings.longest),
        "gru": lambda: Recurrent(size, settings.recurrent_dim, settings.dropout_p),
    }

    def loss(module: nn.Module, rng: np.random.Generator) -> Tensor:
        return text_pairs.loss(module, pairs, rng, settings.batch_size)

    return {
        name: [study.MuonRun(name, seed, make, loss, settings, out) for seed in settings.seeds]
        for name, make in makers.items()
    }


def likeliest_words(corpus: Corpus, rounds: int = 5) -> dict[str, str]:
    """Return the likeliest English word for each German word, by IBM's model 1 (Brown et al. 1993)."""
    sentences = [
        (german.lower().split(), english.lower().split())
        for german, english in zip(corpus.german, corpus.english, strict=True)
    ]
    likely: dict[tuple[str, str], float] = collections.defaultdict(lambda: 1.0)
    for _ in range(rounds):
        counts: dict[tuple[str, str], float] = collections.defaultdict(float)
        totals: dict[str, float] = collections.defaultdict(float)
        for german, english in sentences:
            for word in english:
                whole = sum(likely[own, word] for own in german)
                for own in german:
                    share = likely[own, word] / whole
                    counts[own, word] += share
                    totals[own] += share
        likely = collections.defaultdict(float, {pair: count / totals[pair[0]] for pair, count in counts.items()})
    best: dict[str, tuple[float, str]] = {}
    for (german_word, english_word), share in likely.items():
        best[german_word] = max(best.get(german_word, (0.0, "")), (share, english_word))
    return {own: word for own, (_, word) in best.items()}


def quality(written: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF, both from 0 to 100, ignoring case."""
    try:
        import sacrebleu  # noqa: PLC0415  not needed before
    except ModuleNotFoundError:
        raise SystemExit("BLEU and chrF are sacrebleu's: pip install sacrebleu") from None
    bleu = sacrebleu.corpus_bleu(list(written), [list(wanted)], lowercase=True)
    return {"bleu": bleu.score, "chrf": sacrebleu.corpus_chrf(list(written), [list(wanted)]).score}


@torch.no_grad()
def draw(models_by_name: dict[str, nn.Module], tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """Draw what the words of each model's output attend to in a German text: mean of the heads in the last layer."""
    source = tokenizer.encode(text)
    figures = {}
    for name, model in models_by_name.items():
        (written,) = text_pairs.write(model, [source.ids], 40)
        tokens, read = torch.tensor([[text_pairs.START, *written]]), torch.tensor([source.ids])
        if isinstance(model, models.EncoderDecoder):
            weights = model.cross_matrices(read, tokens)[-1].to_dense()[0].mean(0)
        else:
            given = model.given(read, source_positions=padded_positions([len(source.ids)]))
            weights = given.matrix(tokens)[0].to_dense()[0, 0]
        labels = [tokenizer.decode([own]).strip() or "·" for own in written]
        read_labels = [tokenizer.decode([own]).strip() or "·" for own in source.ids]
        # Row i predicts token i, so label it with that token.
        figures[name] = viz.heatmap(weights[: len(labels)], x_labels=read_labels, y_labels=labels)
    return figures


def main(arguments: list[str] | None = None, corpus: Corpus | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table. ``corpus`` replaces Debian's."""
    parser = study.parser(__doc__, "out/translation")
    parser.add_argument("--text", default="Werkzeuge zum Lesen und Schreiben von Bildern", help="of the figure")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    corpus = corpus or load(settings)
    tokenizer = text_pairs.tokenizer_of([*corpus.german, *corpus.english], settings.vocab_size)
    runs = runs_of(corpus, tokenizer, settings, given.out)
    for name, own in runs.items():
        console.print(f"{name}: {sum(p.numel() for p in own[0].module.parameters()):,} weights")
    study.train_all([run for own in runs.values() for run in own], console)

    read = [own.ids[: settings.longest] for own in tokenizer.encode_batch(corpus.held_out_german)]
    said = {"transformer": "Transformer", "gru": "GRU with additive attention"}
    rows = []
    for name, own in runs.items():
        found = []
        for run in own:
            written = [
                tokenizer.decode(tokens).strip() for tokens in text_pairs.write(run.module, read, settings.longest)
            ]
            found.append(quality(written, corpus.held_out_english))
        by_seed = {str(run.seed): one["bleu"] for run, one in zip(own, found, strict=True)}
        rows.append(study.summary(said[name], by_seed, chrf=float(np.mean([one["chrf"] for one in found]))))
    words = likeliest_words(corpus)
    plain = [" ".join(words.get(word, word) for word in text.lower().split()) for text in corpus.held_out_german]
    for name, texts in (("word by word", plain), ("the German text as it is", corpus.held_out_german)):
        one = quality(texts, corpus.held_out_english)
        rows.append(study.summary(name, {"-": one["bleu"]}, chrf=one["chrf"]))

    first = {name: own[0].module for name, own in runs.items()}
    first["transformer"].save_pretrained(given.out / "model")
    drawn = draw(first, tokenizer, given.text)
    figures = [viz.save(figure, given.out / f"looks-{name}.png") for name, figure in drawn.items()]
    title = f"BLEU of {len(read):,} held-out German texts in English"
    trained = [run for own in runs.values() for run in own]
    study.finish(
        given.out, title, settings, trained, rows, console=console, form="{:.1f}", figures=figures, chrf="chrF"
    )
    return rows


if __name__ == "__main__":
    main()
