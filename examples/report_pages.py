"""Three pages with all attention of a model: of an encoder, of a language model, and between two sequences.

    python examples/report_pages.py

writes ``encoder.html``, ``language-model.html`` and ``dates.html`` into ``out/report``; ``--out FOLDER`` names another
folder. The third is of a small encoder-decoder that learns here, in a minute or two, to write dates such as
"14 December 1979" as "1979-12-14": letter by letter, it attends to the year, then the month, then the day.
"""

from __future__ import annotations

import argparse
import datetime as dt
import random
import warnings
from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from saccade import models, viz

LETTERS = " ,-.0123456789abcdefghijklmnopqrstuvwxyzADFJMNOS"
NUMBER = {letter: place + 3 for place, letter in enumerate(LETTERS)}
BEGIN, END = 1, 2  # 0 is padding
FORMS = ("{day.day} {day:%B} {day.year}", "{day:%B} {day.day}, {day.year}", "{day.day} {day:%b} {day.year}")


def encoder_page(path: Path) -> None:
    """Write the page of MiniLM on a text about Python."""
    model = models.minilm()
    assert model.tokenizer is not None
    encoding = model.tokenizer.encode(topics.topics["bltin-null-object"] + topics.topics["for"][:1200])
    with sc.record(model, keep="qk") as recording, torch.no_grad():
        model(torch.tensor([encoding.ids]))
    viz.report(recording, path, tokens=encoding.tokens, title="MiniLM reads about Python")


def language_model_page(path: Path, count: int = 4000) -> None:
    """Write the page of a language model far beyond the 256 tokens of its training."""
    model = models.small_decoder()
    assert model.tokenizer is not None
    encoding = model.tokenizer.encode("\n".join(topics.topics.values()))
    warnings.simplefilter("ignore", models.UntrainedLengthWarning)
    with sc.record(model, keep="qk") as recording, torch.no_grad():
        model.hidden(torch.tensor([encoding.ids[:count]]))
    viz.report(recording, path, tokens=encoding.tokens[:count], title=f"{count:,} tokens of Python's documentation")


def date() -> tuple[str, str]:
    """Return a date in words and in ISO format."""
    day = dt.date(1900, 1, 1) + dt.timedelta(random.randrange(60000))
    return random.choice(FORMS).format(day=day), day.isoformat()


def batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return padded inputs, the positions of their letters (-1 at padding), and the targets."""
    pairs = [date() for _ in range(count)]
    texts = [torch.tensor([NUMBER[letter] for letter in text]) for text, _ in pairs]
    written = torch.tensor([[BEGIN, *(NUMBER[letter] for letter in answer), END] for _, answer in pairs])
    pad = torch.nn.utils.rnn.pad_sequence
    positions = pad([torch.arange(len(text)) for text in texts], batch_first=True, padding_value=-1)
    return pad(texts, batch_first=True), positions, written


def reader_of_dates(steps: int) -> models.EncoderDecoder:
    """Train a small encoder-decoder."""
    random.seed(0)
    torch.manual_seed(0)
    config = models.EncoderDecoderConfig(
        vocab_size=len(LETTERS) + 3,
        max_len=32,
        embed_dim=64,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        feed_forward_dim=128,
    )
    model = models.EncoderDecoder(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        read, positions, written = batch(64)
        logits = model(read, written[:, :-1], source_positions=positions)
        loss = F.cross_entropy(logits.flatten(0, 1), written[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    return model.eval()


def dates_page(path: Path, steps: int = 800, text: str = "14 December 1979", answer: str = "1979-12-14") -> int:
    """Write the page of a model that converts dates; return the number of right letters."""
    model = reader_of_dates(steps)
    source = torch.tensor([[NUMBER[letter] for letter in text]])
    tokens = torch.tensor([[BEGIN, *(NUMBER[letter] for letter in answer)]])
    with sc.record(model, keep="qk") as recording, torch.no_grad():
        right = model(source, tokens)[0, :-1].argmax(-1) == tokens[0, 1:]
    written = ["<s>", *answer]
    names = {"encoder*": list(text), "*cross*": (written, list(text)), "*": written}
    viz.report(recording, path, tokens=names, title=f"From {text} to {answer}")
    return int(right.sum())


def main() -> None:
    """Write the pages."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--out", type=Path, default=Path("out/report"), help="the folder for the pages")
    out = options.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    encoder_page(out / "encoder.html")
    language_model_page(out / "language-model.html")
    right = dates_page(out / "dates.html")
    print(f"{right} of 10 letters of the date are the likeliest")
    for path in sorted(out.glob("*.html")):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
