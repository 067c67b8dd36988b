"""Train a small language model on manuals, in English and Chinese, and hold it against a 5-gram. Minutes on two cores.

    python examples/train_language_model.py --chinese man/zh_CN

learns what CPython tells of itself (the topics of its manual and the docstrings of its standard library; PSF licence)
and, where they are given, the manual pages of Debian's package manpages-zh (GFDL 1.2 or later). Nothing is downloaded
here; the pages are those of

    apt-get download manpages-zh && dpkg -x manpages-zh_*.deb . && mv usr/share/man .

Text is cut into byte-level pairs (BPE), so that nothing is unknown. Every tenth block of text is held out, after
paragraphs that occur twice have been taken out, and never seen in training; on it the model stands beside an
interpolated 5-gram with modified Kneser-Ney smoothing, over the same tokens. Both are told in bits per byte too, which
no choice of tokens can flatter. Writes ``model/`` (which ``Decoder.from_pretrained`` and others' libraries read),
``card.json`` and a figure of the losses. A run that is stopped goes on after its last checkpoint, and ends with the
same weights as if it had never stopped.

Needs ``pip install 'saccade[all]'``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import dataclasses
import gzip
import hashlib
import json
import math
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F

from saccade.models import Decoder, DecoderConfig, generate

END = "<|end|>"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides a run's numbers; a checkpoint made with others is not used."""

    vocab_size: int = 2048
    max_len: int = 256
    embed_dim: int = 160
    num_heads: int = 5
    num_kv_heads: int = 1
    num_layers: int = 4
    feed_forward_dim: int = 416
    dropout_p: float = 0.0
    steps: int = 2400
    batch_size: int = 8
    matrix_rate: float = 0.02
    learning_rate: float = 5e-3
    warm_up: int = 60
    weight_decay: float = 0.1
    check_every: int = 100
    seed: int = 0
    block_bytes: int = 4000
    text_bytes: int | None = None
    threads: int = 2


QUICK = Settings(
    vocab_size=320,
    max_len=32,
    embed_dim=16,
    num_heads=2,
    num_kv_heads=1,
    num_layers=1,
    feed_forward_dim=24,
    steps=20,
    batch_size=4,
    warm_up=2,
    check_every=5,
    block_bytes=1000,
    text_bytes=20_000,
    threads=1,
)


class Source(NamedTuple):
    """Texts in one language, where they come from and what may be done with them."""

    language: str
    name: str
    licence: str
    documents: Iterable[str]


def english() -> Source:
    """What CPython tells of itself: the topics of its manual, and the docstrings of its standard library."""
    from pydoc_data.topics import topics  # noqa: PLC0415  half a megabyte that --help need not read

    name = f"pydoc_data.topics and docstrings of the standard library, CPython {platform.python_version()}"

    def documents() -> Iterator[str]:
        for key in sorted(topics):
            yield topics[key]
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            # As CPython has it: what others installed lies in site-packages, and tests explain nothing.
            if not {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(path.parts):
                yield "\n\n".join(docstrings(path))

    return Source("English", name, "PSF-2.0", documents())


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a module's own, its classes and functions, without their indentation."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and found.isascii():
                yield found


def chinese(folder: Path) -> Source:
    """The Chinese manual pages in a folder, without their markup; paragraphs that are mostly code are left out."""
    found = (page_text(path) for path in sorted(folder.rglob("*.gz")))
    licence = "GFDL-1.2-or-later, some pages GPL-2.0"
    return Source("Chinese", "manual pages of Debian's manpages-zh (zh_CN)", licence, found)


def page_text(path: Path) -> str:
    """What a person reads of a page written in roff: its prose, without fonts, macros and comments."""
    paragraphs: list[list[str]] = [[]]
    for line in gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace").splitlines():
        macro = re.match(r"[.'](\w*)\s*(.*)", line)
        if line.startswith(('.\\"', "'\\")) or (macro and macro[1] in ("TH", "so", "ds", "de", "if", "ie", "el", "nr")):
            continue
        if macro and macro[1] not in ("B", "I", "BR", "BI", "IR", "RB", "RI", "IB"):
            paragraphs.append([])
        text = _plain(macro[2] if macro else line).strip()
        if text:
            paragraphs[-1].append(text)
        if macro and macro[1] in ("SH", "SS"):  # a heading is no part of what follows
            paragraphs.append([])
    joined = ["".join(_joined(lines)) for lines in paragraphs if lines]
    return "\n\n".join(text for text in joined if len(re.findall("[\u4e00-\u9fff]", text)) > 0.3 * len(text))


def _plain(text: str) -> str:
    text = re.sub(r"\\f(\[\w*\]|\(\w\w|.)|\\s[+-]?\d|\\[&:%/,|^]", "", text)
    text = re.sub(r"\\\((\w\w|..)|\\\*\((..)|\\\*.|\\\[\w+\]", " ", text)
    return text.replace("\\-", "-").replace("\\ ", " ").replace("\\e", "\\").replace('"', "")


def _joined(lines: list[str]) -> Iterator[str]:
    """Lines of one paragraph, with a blank between two words and none between two Chinese characters."""
    for index, line in enumerate(lines):
        if index and (line[0].isascii() or lines[index - 1][-1].isascii()):
            yield " "
        yield line


def blocks_of(source: Source, settings: Settings) -> tuple[list[str], list[str]]:
    """Blocks of paragraphs to learn from, and to hold out: every tenth.

    A paragraph that occurs twice is taken out where it comes again: what was learned must not be held out too.
    """
    seen: set[str] = set()
    blocks: list[str] = []
    used, limit = 0, settings.text_bytes
    for document in source.documents:
        block: list[str] = []
        for paragraph in re.split(r"\n\s*\n", document):
            key = " ".join(paragraph.split())
            if not key or key in seen or (limit is not None and used > limit):
                continue
            seen.add(key)
            block.append(paragraph)
            used += len(paragraph.encode())
            if sum(len(own.encode()) for own in block) >= settings.block_bytes:
                blocks.append("\n\n".join(block))
                block = []
        if block:
            blocks.append("\n\n".join(block))
        if limit is not None and used > limit:
            break
    held_out = blocks[5::10]
    return [block for index, block in enumerate(blocks) if index % 10 != 5], held_out


def train_tokenizer(texts: Iterable[str], settings: Settings) -> Tokenizer:
    """Byte-level pairs: every text has tokens, and tokens give the text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Language(NamedTuple):
    """One language: a stream of tokens to learn from, and held-out blocks of tokens with their bytes."""

    name: str
    stream: Tensor
    held_out: list[list[int]]
    held_out_bytes: int


class Run:
    """A model in training: as it begins, or as its last checkpoint left it."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer, fingerprint: str, path: Path):
        self.settings, self.fingerprint, self.path = settings, fingerprint, path
        torch.manual_seed(settings.seed)
        end = tokenizer.token_to_id(END)
        self.decoder = Decoder(
            DecoderConfig(
                vocab_size=tokenizer.get_vocab_size(),
                max_len=settings.max_len,
                embed_dim=settings.embed_dim,
                num_heads=settings.num_heads,
                num_kv_heads=settings.num_kv_heads,
                num_layers=settings.num_layers,
                feed_forward_dim=settings.feed_forward_dim,
                dropout_p=settings.dropout_p,
                end_tokens=(end,),
            ),
            tokenizer,
        )
        # Muon for the matrices within the layers, which it moves evenly in all directions; Adam for the vectors.
        inner = [p for p in self.decoder.stack.parameters() if p.dim() == 2]
        outer = [p for p in self.decoder.parameters() if not any(p is own for own in inner)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(inner, weight_decay=settings.weight_decay), settings.matrix_rate),
            (torch.optim.AdamW(outer, betas=(0.9, 0.95), weight_decay=0.0), settings.learning_rate),
        ]
        self.step, self.seconds, self.starts_over = 0, 0.0, False
        self.losses: list[tuple[int, float, float]] = []  # step, loss in training, loss held out
        self._resume()

    def train(self, languages: list[Language], after_step: Callable[[float], None]) -> None:
        """Train what is left, with a checkpoint now and then."""
        recent: list[float] = []
        while self.step < self.settings.steps:
            started = time.perf_counter()
            recent.append(self._train_step(languages))
            self.step += 1
            self.seconds += time.perf_counter() - started
            if self.step % self.settings.check_every == 0 or self.step == self.settings.steps:
                some = [(own.held_out[:: max(1, len(own.held_out) // 8)]) for own in languages]
                held_out = [held_out_nats(self.decoder, blocks, self.settings) for blocks in some]
                tokens = sum(len(block) + 1 for blocks in some for block in blocks)
                self.losses.append((self.step, sum(recent) / len(recent), sum(held_out) / tokens))
                recent = []
                self._save()
            after_step(recent[-1] if recent else self.losses[-1][1])

    def _train_step(self, languages: list[Language]) -> float:
        # What is drawn depends on seed and step alone, so a resumed run needs no random state.
        torch.manual_seed(1_000_003 * self.settings.seed + self.step)
        windows = []
        for index in range(self.settings.batch_size):
            stream = languages[index % len(languages)].stream
            start = int(torch.randint(0, len(stream) - self.settings.max_len, ()))
            windows.append(stream[start : start + self.settings.max_len + 1])
        tokens = torch.stack(windows)
        for optimizer, rate in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate * self._rate()
        self.decoder.train()
        logits = self.decoder(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
        return loss.item()

    def _rate(self) -> float:
        """Up in a line, then down along a cosine to a twentieth."""
        if self.step < self.settings.warm_up:
            return (self.step + 1) / self.settings.warm_up
        done = (self.step - self.settings.warm_up) / max(1, self.settings.steps - self.settings.warm_up)
        return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2

    def _save(self) -> None:
        tensors = {f"decoder.{name}": own for name, own in self.decoder.state_dict().items()}
        for number, (optimizer, _) in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer{number}.{index}.{name}": own for name, own in state.items()}
        told = {"fingerprint": self.fingerprint, "step": str(self.step), "seconds": repr(self.seconds)}
        told["losses"] = json.dumps(self.losses)
        # Written beside its destination and renamed when it is complete: a run that is killed leaves no half file.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            save_file(tensors, beside, metadata=told)
            os.replace(beside, self.path)
        finally:
            beside.unlink(missing_ok=True)

    def _resume(self) -> None:
        if not self.path.exists():
            return
        with safe_open(self.path, "pt") as file:
            told = file.metadata() or {}
            if told.get("fingerprint") != self.fingerprint:
                self.starts_over = True
                return
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        parts: dict[str, dict[str, Tensor]] = collections.defaultdict(dict)
        for name, own in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = own
        self.decoder.load_state_dict(parts["decoder"])
        for number, (optimizer, _) in enumerate(self.optimizers):
            states: dict[int, dict[str, Tensor]] = collections.defaultdict(dict)
            for name, own in parts[f"optimizer{number}"].items():
                index, _, key = name.partition(".")
                states[int(index)][key] = own
            optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(states)})
        self.step, self.seconds = int(told["step"]), float(told["seconds"])
        self.losses = [tuple(row) for row in json.loads(told["losses"])]


@torch.no_grad()
def held_out_nats(decoder: Decoder, blocks: list[list[int]], settings: Settings) -> float:
    """How surprised the model is at these blocks in all, in nats: each is read from its start to its end.

    A block longer than the model's text is read in steps of half a text, so that every token but the first ones has at
    least half a text before it.
    """
    decoder.eval()
    (end,) = decoder.config.end_tokens
    total, half = 0.0, settings.max_len // 2
    for block in blocks:
        tokens = torch.tensor([end, *block, end])
        first = 1  # the next token to be told
        while first < len(tokens):
            start = 0 if first == 1 else first - half
            window = tokens[start : start + settings.max_len + 1]
            logits = decoder.logits(decoder.hidden(window[None, :-1])[0, first - 1 - start :])
            total += F.cross_entropy(logits.float(), window[first - start :], reduction="sum").item()
            first = start + len(window)
    return total


class NGram:
    """An interpolated n-gram with modified Kneser-Ney smoothing.

    The probability of a token after its history is its discounted count there, plus what the discounts left times its
    probability after the history that is one token shorter. Shorter histories count in how many contexts a token
    occurs, not how often. Below the shortest, all tokens are alike.

    Reference: Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 2.8.
    """

    def __init__(self, blocks: Iterable[list[int]], order: int, vocab_size: int, end: int):
        self.order, self.vocab_size, self.end = order, vocab_size, end
        counts: list[dict[tuple[int, ...], collections.Counter[int]]] = [{} for _ in range(order)]
        for history, token in self._pairs(blocks):
            counts[order - 1].setdefault(history, collections.Counter())[token] += 1
        for size in range(order - 2, -1, -1):  # in how many contexts, from the longer ones
            for history, found in counts[size + 1].items():
                shorter = counts[size].setdefault(history[1:], collections.Counter())
                for token in found:
                    shorter[token] += 1
        self._counts = counts
        self._discounts = [_discounts(level) for level in counts]

    def nats(self, blocks: Iterable[list[int]]) -> float:
        """How surprised it is at these blocks in all."""
        return -sum(math.log(self.probability(history, token)) for history, token in self._pairs(blocks))

    def probability(self, history: tuple[int, ...], token: int) -> float:
        """Of ``token`` after the last ``order - 1`` tokens."""
        found = 1 / self.vocab_size
        for size in range(self.order):
            own = self._counts[size].get(history[len(history) - size :])
            if own is None:
                continue  # never seen: what the shorter history says stays
            discounts = self._discounts[size]
            total = own.total()
            count = own.get(token, 0)
            left = sum(discounts[min(c, 3)] * n for c, n in collections.Counter(own.values()).items())
            found = max(count - discounts[min(count, 3)], 0) / total + left / total * found
        return found

    def _pairs(self, blocks: Iterable[list[int]]) -> Iterator[tuple[tuple[int, ...], int]]:
        for block in blocks:
            padded = [self.end] * (self.order - 1) + block + [self.end]
            for index in range(self.order - 1, len(padded)):
                yield tuple(padded[index - self.order + 1 : index]), padded[index]


def _discounts(level: dict[tuple[int, ...], collections.Counter[int]]) -> tuple[float, float, float, float]:
    """What is taken of counts of 0, 1, 2, and 3 or more, from how many there are of each."""
    having = collections.Counter(count for found in level.values() for count in found.values() if count <= 4)
    n1, n2, n3, n4 = (having[count] for count in (1, 2, 3, 4))
    if not (n1 and n2 and n3):
        return (0.0, 0.5, 1.0, 1.5)
    y = n1 / (n1 + 2 * n2)
    estimates = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # Of few counts, an estimate may take nothing, or all: half is taken then.
    one, two, more = (own if 0 < own < count else count / 2 for count, own in enumerate(estimates, start=1))
    return (0.0, one, two, more)


def compare(run: Run, languages: list[Language], ngram: NGram, folder: Path) -> list[dict[str, Any]]:
    """One row per language: model and 5-gram on the same held-out tokens.

    The model is written to ``folder`` in half precision, and measured as it is read back; what it was before the
    rounding stands beside it.
    """
    before = [held_out_nats(run.decoder, own.held_out, run.settings) for own in languages]
    copy.deepcopy(run.decoder).half().save_pretrained(folder)
    written = Decoder.from_pretrained(folder)
    rows = []
    for own, exact in zip(languages, before, strict=True):
        tokens = sum(len(block) + 1 for block in own.held_out)
        row: dict[str, Any] = {"language": own.name, "held_out_tokens": tokens, "held_out_bytes": own.held_out_bytes}
        for name, nats in (
            ("model", held_out_nats(written, own.held_out, run.settings)),
            ("before_rounding", exact),
            ("5-gram", ngram.nats(own.held_out)),
        ):
            row[name] = {"nats_per_token": nats / tokens, "bits_per_byte": nats / math.log(2) / own.held_out_bytes}
        rows.append(row)
    return rows


def as_table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a person reads them."""
    table = Table(title="held-out text", title_justify="left")
    for heading in ("", "tokens", "model", "5-gram", "model", "5-gram"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("", "", "nats a token", "nats a token", "bits a byte", "bits a byte", style="dim")
    for row in rows:
        numbers = [f"{row[who]['nats_per_token']:.3f}" for who in ("model", "5-gram")]
        numbers += [f"{row[who]['bits_per_byte']:.3f}" for who in ("model", "5-gram")]
        table.add_row(row["language"], f"{row['held_out_tokens']:,}", *numbers)
    return table


def draw_losses(losses: list[tuple[int, float, float]], path: Path) -> None:
    """The losses in training and on held-out text, by step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 3.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _, _ in losses]
    axes.plot(steps, [loss for _, loss, _ in losses], label="training")
    axes.plot(steps, [loss for _, _, loss in losses], label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def continue_text(decoder: Decoder, start: str, count: int) -> str:
    """``start`` with the likeliest tokens after it."""
    assert decoder.tokenizer is not None
    tokens = decoder.tokenizer.encode(start).ids
    (new,) = generate(decoder, [tokens], count, stop=decoder.config.end_tokens)
    return decoder.tokenizer.decode(tokens + new)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, measure, write; returns the model's card."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=Path("out/language-model"), help="folder to write to (default: %(default)s)"
    )
    parser.add_argument(
        "--chinese", type=Path, help="folder with the manual pages of manpages-zh; English alone if none"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few seconds, to see that it runs; its numbers mean little"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    given = parser.parse_args(arguments)
    settings = dataclasses.replace(QUICK if given.quick else Settings(), seed=given.seed)
    if given.chinese is not None and not any(given.chinese.rglob("*.gz")):
        parser.error(f"--chinese must be a folder with manual pages (*.gz); got {given.chinese}.")
    torch.set_num_threads(settings.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    sources = [english()] + ([] if given.chinese is None else [chinese(given.chinese)])
    split = [blocks_of(source, settings) for source in sources]
    tokenizer = train_tokenizer([block for learn, _ in split for block in learn], settings)
    end = tokenizer.token_to_id(END)
    encoded = [
        [[one.ids for one in tokenizer.encode_batch(blocks)] for blocks in (learn, held_out)]
        for learn, held_out in split
    ]
    languages = [
        Language(
            source.language,
            torch.tensor([end] + [token for block in learn for token in [*block, end]]),
            held_out,
            sum(len(block.encode()) for block in texts),
        )
        for source, (learn, held_out), (_, texts) in zip(sources, encoded, split, strict=True)
    ]
    digests = [hashlib.sha256("\0".join(learn + held_out).encode()).hexdigest() for learn, held_out in split]
    fingerprint = json.dumps([dataclasses.asdict(settings), digests])
    run = Run(settings, tokenizer, fingerprint, given.out / "checkpoint.safetensors")
    if run.starts_over:
        console.print(f"{given.out} holds a checkpoint of other settings or texts; this run starts over")
    count = sum(p.numel() for p in run.decoder.parameters())
    console.print(f"{count:,} parameters; {sum(len(own.stream) for own in languages):,} tokens to learn from")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("steps", total=settings.steps, completed=run.step)
        run.train(languages, lambda loss: progress.update(task, advance=1, description=f"loss {loss:.3f}"))

    folder = given.out / "model"
    ngram = NGram([block for learn, _ in encoded for block in learn], 5, tokenizer.get_vocab_size(), end)
    rows = compare(run, languages, ngram, folder)
    console.print(as_table(rows))
    for start in ("The ", "该"):
        console.print(continue_text(run.decoder, start, 40), markup=False, highlight=False)
    card = {
        "command": "python examples/train_language_model.py"
        + (" --chinese zh_CN" if given.chinese is not None else "")
        + (f" --seed {given.seed}" if given.seed else ""),
        "settings": dataclasses.asdict(settings),
        "parameters": count,
        "dtype": "float16",
        "texts": [
            {
                "language": source.language,
                "source": source.name,
                "licence": source.licence,
                "bytes_learned": sum(len(block.encode()) for block in learn),
                "sha256": digest,
            }
            for source, (learn, _), digest in zip(sources, split, digests, strict=True)
        ],
        "held_out": rows,
        "minutes": round(run.seconds / 60, 1),
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    written = given.out / "card.json"
    beside = written.with_name(f".{written.name}.{os.getpid()}.part")
    beside.write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(beside, written)
    draw_losses(run.losses, given.out / "losses.png")
    console.print(f"wrote {folder}, {written} and {given.out / 'losses.png'}")
    return card


if __name__ == "__main__":
    main()
