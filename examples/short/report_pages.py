"""Three pages that show all attention of a model: of an encoder, of a language model, and between two texts.

    python examples/short/report_pages.py

writes ``encoder.html``, ``language-model.html`` and ``dates.html`` into the current folder. The third is of a small
encoder-decoder that learns here, in a minute or two, to write dates such as "3 May 1979" as "1979-05-03".
"""

import datetime
import random

import torch
from pydoc_data import topics
from torch.nn import functional as F

import saccade as sc
from saccade import models, viz

# An encoder reads a paragraph; its tokenizer spells pieces as BERT's does, which the page puts right.
encoder = models.minilm()
encoding = encoder.tokenizer.encode(topics.topics["bltin-null-object"] + topics.topics["for"][:1200])
with sc.record(encoder, keep="qk") as recording, torch.no_grad():
    encoder(torch.tensor([encoding.ids]))
viz.report(recording, "encoder.html", tokens=encoding.tokens, title="MiniLM reads about Python")

# A language model reads 4,000 tokens, of which it was trained on 256 at a time.
decoder = models.small_decoder()
encoding = decoder.tokenizer.encode("\n".join(topics.topics.values()))
with sc.record(decoder, keep="qk") as recording, torch.no_grad():
    decoder.hidden(torch.tensor([encoding.ids[:4000]]))
viz.report(recording, "language-model.html", tokens=encoding.tokens[:4000], title="4,000 tokens of Python's documentation")

# Between two texts: dates, letter by letter.
random.seed(0)
torch.manual_seed(0)
letters = " ,-.0123456789abcdefghijklmnopqrstuvwxyzADFJMNOS"
number = {letter: place + 3 for place, letter in enumerate(letters)}  # 0 is padding, 1 begins, 2 ends
sizes = {"embed_dim": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "feed_forward_dim": 128}
model = models.EncoderDecoder(models.EncoderDecoderConfig(vocab_size=len(letters) + 3, max_len=32, **sizes))


def date():
    """A day, as people write it and as computers do."""
    day = datetime.date(1900, 1, 1) + datetime.timedelta(random.randrange(60000))
    form = random.choice(["{d.day} {d:%B} {d.year}", "{d:%B} {d.day}, {d.year}", "{d.day} {d:%b} {d.year}"])
    return form.format(d=day), day.isoformat()


def batch(count):
    """Tokens of what is read, padded, how long each is, and what is to be written."""
    pairs = [date() for _ in range(count)]
    read = [torch.tensor([number[letter] for letter in text]) for text, _ in pairs]
    written = torch.tensor([[1, *(number[letter] for letter in text), 2] for _, text in pairs])
    positions = [torch.arange(len(text)) for text in read]
    padded = torch.nn.utils.rnn.pad_sequence(read, batch_first=True)
    return padded, torch.nn.utils.rnn.pad_sequence(positions, batch_first=True, padding_value=-1), written


optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(600):
    read, positions, written = batch(64)
    logits = model(read, written[:, :-1], source_positions=positions)
    loss = F.cross_entropy(logits.flatten(0, 1), written[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 99:
        print(f"step {step + 1}: loss {loss.item():.3f}")

model.eval()
text, answer = "14 December 1979", "1979-12-14"
source, tokens = torch.tensor([[number[letter] for letter in text]]), torch.tensor([[1, *(number[own] for own in answer)]])
with sc.record(model, keep="qk") as recording, torch.no_grad():
    right = model(source, tokens)[0, :-1].argmax(-1) == tokens[0, 1:]
print(f"{text} -> {answer}: {int(right.sum())} of {len(answer)} letters are the likeliest")
names = {"encoder*": list(text), "*self_attention": ["<s>", *answer], "*": (["<s>", *answer], list(text))}
viz.report(recording, "dates.html", tokens=names, title="From 14 December 1979 to 1979-12-14")
