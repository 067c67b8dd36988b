"""Handwritten numbers in words: a Vision Transformer reads them, a decoder writes them in English or Chinese.

    python examples/read_numbers.py

puts one to four of scikit-learn's handwritten digits in a row, wherever there is room, and learns to write
under it "one hundred forty-two", or "一百四十二": the first token names the language. Neither the digits of a test
image were seen in training, nor, from 100 on, its number. Three seeds, some minutes each; prints how many
captions are right to the last word, against classifiers that get every digit cut out; and writes
``results.json`` and a figure of what each word of a caption attends to. Interrupted runs resume after their
last checkpoint, with the same final weights.

Needs ``pip install 'saccade-attention[all]' scikit-learn``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

import study
from saccade import caches, masks, models, nn, positions, viz
from saccade.viz.fonts import covering_families


@dataclasses.dataclass(frozen=True)
class Settings(study.Settings):
    """The settings of a run."""

    width: int = 40
    patch: int = 4
    embed_dim: int = 64
    num_heads: int = 4
    num_encoder_layers: int = 3
    num_decoder_layers: int = 2
    steps: int = 3000
    warm_up: int = 200
    train_digits: int = 1297
    test_pictures: int = 1000


QUICK = Settings(
    embed_dim=16,
    num_encoder_layers=1,
    steps=12,
    batch_size=8,
    warm_up=2,
    save_every=5,
    train_digits=300,
    test_pictures=20,
    seeds=(0,),
)
SIDE = 8  # side of a digit, in pixels

UNITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
UNITS += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
DIGITS = "零一二三四五六七八九"


def in_english(number: int) -> list[str]:
    """Return the words of a number below 10,000; a hyphen is a word: 142 is ``one hundred forty - two``."""
    if number < 20:
        return [UNITS[number]]
    if number < 100:
        tens, rest = divmod(number, 10)
        return [TENS[tens - 2], *(["-", UNITS[rest]] if rest else [])]
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    return [UNITS[count], name, *(in_english(rest) if rest else [])]


def in_chinese(number: int) -> list[str]:
    """Return the characters of a number below 10,000: 142 is 一百四十二, 1005 is 一千零五, 12 is 十二."""
    said = _places(number)
    return said[1:] if 10 <= number < 20 else said


def _places(number: int) -> list[str]:
    for size, name in ((1000, "千"), (100, "百"), (10, "十")):
        if number >= size:
            count, rest = divmod(number, size)
            # Any number of zeros between two digits is one 零.
            zero = ["零"] if 0 < rest < size // 10 else []
            return [DIGITS[count], name, *zero, *(_places(rest) if rest else [])]
    return [DIGITS[number]]


IN_WORDS = {"en": in_english, "zh": in_chinese}
TOKENS = ["<end>", "<en>", "<zh>", *UNITS, *TENS, "-", "hundred", "thousand", *DIGITS, *"十百千"]
TOKEN_OF = {token: index for index, token in enumerate(TOKENS)}
END = TOKEN_OF["<end>"]
LONGEST = 9  # <en> seven thousand seven hundred seventy - seven


def as_tokens(number: int, language: str) -> list[int]:
    """Return the caption: the language, the words, the end."""
    return [TOKEN_OF[token] for token in (f"<{language}>", *IN_WORDS[language](number), "<end>")]


def as_text(tokens: list[int]) -> str:
    """Return words in normal spelling: ``one hundred forty-two``, 一百四十二."""
    words = [TOKENS[token] for token in tokens]
    return ("" if all(word in DIGITS + "十百千" for word in words) else " ").join(words).replace(" - ", "-")


class Digits(NamedTuple):
    """Single digits: images ``[n, 8, 8]`` between 0 and 1, and their classes."""

    images: np.ndarray
    labels: np.ndarray


def load(settings: Settings) -> tuple[Digits, Digits]:
    """Load scikit-learn's digits for training and for testing, without common images."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  a second of import that --help need not wait for
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    data = load_digits()
    how = {"train_size": settings.train_digits, "stratify": data.target, "random_state": 0}
    split = train_test_split(data.images.astype(np.float32) / 16, data.target, **how)
    return Digits(split[0], split[2]), Digits(split[1], split[3])


def is_held_out(number: int) -> bool:
    """Return whether a number is in the test set: every tenth number from 100, scattered by a product."""
    return number >= 100 and number * 7919 % 9973 % 10 == 0


def draw_number(rng: np.random.Generator, *, held_out: bool) -> int:
    """Draw a number of one to four digits, all lengths equally often; from 100 on held out or not."""
    size = int(rng.integers(1, 5))
    while True:
        number = int(rng.integers(10 ** (size - 1) if size > 1 else 0, 10**size))
        if size < 3 or is_held_out(number) == held_out:
            return number


class Pictures(NamedTuple):
    """Images ``[n, 8, width]``, their numbers, and their digits from left to right."""

    images: Tensor
    numbers: list[int]
    digits: list[list[int]]


def compose(digits: Digits, count: int, settings: Settings, rng: np.random.Generator, *, held_out: bool) -> Pictures:
    """Draw numbers with digits of several writers at random positions without overlap."""
    numbers = [draw_number(rng, held_out=held_out) for _ in range(count)]
    images = np.zeros((count, SIDE, settings.width), np.float32)
    by_label = [np.flatnonzero(digits.labels == label) for label in range(10)]
    chosen = [[int(rng.choice(by_label[int(digit)])) for digit in str(number)] for number in numbers]
    for image, own in zip(images, chosen, strict=True):
        room = np.sort(rng.integers(0, settings.width - SIDE * len(own) + 1, len(own)))
        for left, digit in zip(room + SIDE * np.arange(len(own)), own, strict=True):
            image[:, left : left + SIDE] = digits.images[digit]
    return Pictures(torch.from_numpy(images), numbers, chosen)


class Captioner(torch.nn.Module):
    """An encoder of image patches, and a decoder with cross-attention to them."""

    def __init__(self, settings: Settings):
        super().__init__()
        self.patch, width = settings.patch, settings.embed_dim

        def attention(mask: masks.Mask | None = None) -> nn.MultiHeadAttention:
            return nn.MultiHeadAttention(width, settings.num_heads, mask=mask)

        def reading() -> nn.EncoderLayer:
            return nn.EncoderLayer(attention(), nn.FeedForward(width, 2 * width))

        def writing() -> nn.DecoderLayer:
            own = attention(masks.Causal())
            return nn.DecoderLayer(own, nn.FeedForward(width, 2 * width), cross_attention=attention())

        self.see = torch.nn.Linear(settings.patch**2, width)
        self.patch_position = positions.Learned(SIDE * settings.width // settings.patch**2, width)
        layers = [reading() for _ in range(settings.num_encoder_layers)]
        self.encoder = nn.EncoderStack(layers, final_norm=torch.nn.LayerNorm(width))
        self.embedding = torch.nn.Embedding(len(TOKENS), width)
        self.token_position = positions.Learned(LONGEST, width)
        lines = [writing() for _ in range(settings.num_decoder_layers)]
        self.decoder = nn.DecoderStack(lines, final_norm=torch.nn.LayerNorm(width))
        self.tell = torch.nn.Linear(width, len(TOKENS))
        # Position vectors need about the scale of patch vectors, or the image is a bag of patches for long.
        for table in (self.patch_position, self.embedding, self.token_position):
            torch.nn.init.normal_(table.weight, std=0.5)

    def encode(self, images: Tensor) -> Tensor:
        """Return the encoder's output: ``[batch, 8, width]`` to ``[batch, patches, embed_dim]``."""
        x = self.see(patches(images, self.patch))
        return self.encoder(x + self.patch_position(range(x.shape[1])))

    def embed(self, tokens: Tensor, where: range | Tensor) -> Tensor:
        """Return the embeddings of tokens with their positions in the caption."""
        return self.embedding(tokens) + self.token_position(where)

    def given(self, images: Tensor) -> ConditionedDecoder:
        """Encode images once; return a language model of their captions."""
        return ConditionedDecoder(self, self.encode(images))


def patches(images: Tensor, side: int) -> Tensor:
    """Cut ``[batch, height, width]`` into squares, row by row: ``[batch, patches, side * side]``."""
    return images.unfold(1, side, side).unfold(2, side, side).flatten(3).flatten(1, 2)


class ConditionedDecoder(torch.nn.Module):
    """A captioner with encoded images: a language model for `saccade.models.generate`."""

    def __init__(self, captioner: Captioner, context: Tensor):
        super().__init__()
        self.captioner, self.context = captioner, context

    def forward(
        self, tokens: Tensor, *, positions: range | Tensor | None = None, cache: caches.Cache | None = None
    ) -> Tensor:
        """Return logits ``[batch, len, words]`` of the next token; with a cache, ``tokens`` are the new ones only."""
        if positions is None:
            positions = range(tokens.shape[1]) if cache is None else cache.positions(tokens.shape[1])
        # The first call projects the images to keys and values in every layer; later ones read them from the cache.
        context = self.context if cache is None or cache.length == 0 else None
        x = self.captioner.embed(tokens, positions)
        return self.captioner.tell(self.captioner.decoder(x, context, positions=positions, cache=cache))

    def new_cache(self) -> caches.Cache:
        """Return a KVCache of the words and a CrossCache of the image for every layer."""
        return self.captioner.decoder.new_cache()


@torch.no_grad()
def write(captioner: Captioner, images: Tensor, language: str) -> list[list[int]]:
    """Return the likeliest words for each image, chosen greedily."""
    start = [[TOKEN_OF[f"<{language}>"]]] * len(images)
    return models.generate(captioner.eval().given(images), start, LONGEST, stop=END)


def run_of(seed: int, settings: Settings, digits: Digits, out: Path) -> study.Run:
    """Return one seed, which gets other images in every step."""

    def loss(captioner: Captioner, rng: np.random.Generator) -> Tensor:
        pictures = compose(digits, settings.batch_size, settings, rng, held_out=False)
        captions = [as_tokens(number, language) for language in IN_WORDS for number in pictures.numbers]
        longest = max(map(len, captions))
        tokens = torch.tensor([own + [-1] * (longest - len(own)) for own in captions])
        # Each image is encoded once for captions in all languages. Padding comes after a caption,
        # where its tokens cannot attend to it.
        context = captioner.encode(pictures.images).repeat(len(IN_WORDS), 1, 1)
        logits = ConditionedDecoder(captioner, context)(tokens[:, :-1].clamp(min=0))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=-1)

    return study.Run("captioner", seed, lambda: Captioner(settings), loss, settings, out)


def told_where(train: Digits, test: Digits, pictures: Pictures) -> dict[str, list[bool]]:
    """Return whether two classifiers that get every digit cut out read the whole number right."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  as in load
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415

    found = {}
    classifiers = {
        "logistic regression": LogisticRegression(max_iter=1000),
        "nearest neighbour": KNeighborsClassifier(1),
    }
    for name, classifier in classifiers.items():
        classifier.fit(train.images.reshape(len(train.images), -1), train.labels)
        is_right = classifier.predict(test.images.reshape(len(test.images), -1)) == test.labels
        found[name] = [bool(is_right[own].all()) for own in pictures.digits]
    return found


def summarise(name: str, by_seed: dict[str, list[bool]], pictures: Pictures, **others: Any) -> dict[str, Any]:
    """Return one row: the share of entirely right captions, over seeds and by length of the number."""
    of_length: dict[int, list[bool]] = {1: [], 2: [], 3: [], 4: []}
    for right in by_seed.values():
        for number, own in zip(pictures.numbers, right, strict=True):
            of_length[len(str(number))].append(own)
    shares = {f"of {size}": float(np.mean(own)) for size, own in of_length.items() if own}
    by_mean = {seed: float(np.mean(right)) for seed, right in by_seed.items()}
    return study.summary(name, by_mean, **others, **shares)


HEADINGS = {f"of {size}": f"{size} digit{'s' if size > 1 else ''}" for size in (1, 2, 3, 4)}

COLUMNS = {
    "en": ("mean of all heads, layer {layer}", "sharpest: head {head}, layer {layer}"),
    "zh": ("第 {layer} 层所有头的平均", "最集中的头：第 {layer} 层第 {head} 个"),
}


@torch.no_grad()
def looks(captioner: Captioner, image: Tensor, language: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return the words and their attention to patches by kind of weights: ``[words, rows, columns]``.

    Row i of a cross-attention matrix is that of token i, which chooses the word after it.
    """
    words = write(captioner, image[None], language)[0][: LONGEST - 1]
    tokens = torch.tensor([[TOKEN_OF[f"<{language}>"], *words]])
    x = captioner.embed(tokens, range(tokens.shape[1]))
    across = captioner.decoder.cross_matrices(x, captioner.encode(image[None]))
    # The sharpest head: the one whose rows have the least entropy.
    entropy = torch.stack([matrix.entropy()[0].mean(-1) for matrix in across])
    layer, head = divmod(int(entropy.argmin()), entropy.shape[1])
    weights = [matrix.to_dense()[0] for matrix in across]
    mean, sharpest = COLUMNS[language]
    found = {
        mean.format(layer=len(across)): weights[-1].mean(0),
        sharpest.format(head=head + 1, layer=layer + 1): weights[layer][head],
    }
    shape = (len(words) + 1, image.shape[0] // captioner.patch, image.shape[1] // captioner.patch)
    names = [TOKENS[word] for word in words] + ["<end>"]
    return names, {name: own.reshape(shape) for name, own in found.items()}


def draw(image: Tensor, words: list[str], columns: dict[str, Tensor]) -> Any:
    """Draw one page: a row for each word, a column for each kind of weights, over the image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  imported when used
    from matplotlib.figure import Figure  # noqa: PLC0415

    def panel(weights: Tensor, word: str, most: float) -> np.ndarray:
        figure = viz.spatial_map(1 - image, weights, title=word, limits=(0.0, most))  # dark ink on white paper
        figure.canvas.draw()
        return np.asarray(figure.canvas.buffer_rgba())[..., :3]

    drawn = [[panel(w, word, float(own.max())) for w, word in zip(own, words, strict=True)] for own in columns.values()]
    height, width = (max(one.shape[axis] for column in drawn for one in column) for axis in (0, 1))
    sheet = np.full((height * len(words) + 40, width * len(drawn), 3), 255, np.uint8)
    for column, panels in enumerate(drawn):
        for row, one in enumerate(panels):
            top, left = 40 + height * row, width * column
            sheet[top : top + one.shape[0], left : left + one.shape[1]] = one
    page = Figure(figsize=(sheet.shape[1] / 150, sheet.shape[0] / 150), dpi=150)
    FigureCanvasAgg(page)
    page.figimage(sheet)
    for column, name in enumerate(columns):
        place = (width * column + 21) / sheet.shape[1], 1 - 12 / sheet.shape[0]
        page.text(*place, name, va="top", size=11, family=covering_families(name)[0])
    return page


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train, measure and write; return the rows of the table."""
    parser = study.parser(__doc__, "out/numbers")
    parser.add_argument("--picture", type=int, default=0, help="the test picture of the figure (default: %(default)s)")
    parser.add_argument("--language", choices=list(IN_WORDS), default="en", help="of the figure (default: %(default)s)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    if not 0 <= given.picture < settings.test_pictures:
        parser.error(f"--picture must be at least 0 and below {settings.test_pictures}; got {given.picture}.")
    given.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    train, test = load(settings)
    # The same images for every seed.
    pictures = compose(test, settings.test_pictures, settings, np.random.default_rng(0), held_out=True)
    runs = [run_of(seed, settings, train, given.out) for seed in settings.seeds]
    study.train_all(runs, console)

    rows = []
    for language in IN_WORDS:
        wanted = [as_tokens(number, language)[1:-1] for number in pictures.numbers]
        written = {str(run.seed): write(run.module, pictures.images, language) for run in runs}
        by_seed = {seed: [a == b for a, b in zip(own, wanted, strict=True)] for seed, own in written.items()}
        said = {"en": "English", "zh": "Chinese"}[language]
        rows.append(summarise(said, by_seed, pictures, group=said))
        console.print(f"{pictures.numbers[given.picture]}: {as_text(written[str(runs[0].seed)][given.picture])}")
    for name, right in told_where(train, test, pictures).items():
        rows.append(summarise(f"{name}, with digits cut out", {"-": right}, pictures, knows_more=True))
    image = pictures.images[given.picture]
    figure = viz.save(draw(image, *looks(runs[0].module, image, given.language)), given.out / "looks.png")
    title = "captions with every word right"
    study.finish(given.out, title, settings, runs, rows, console=console, figures=[figure], **HEADINGS)
    return rows


if __name__ == "__main__":
    main()
