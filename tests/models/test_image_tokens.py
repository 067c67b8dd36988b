"""Tests of a decoder of a text and the cells of an image after it, with another mask in each layer."""

import pytest
import torch

from saccade import masks
from saccade.models import Decoder, DecoderConfig, generate

TEXT, HEIGHT, WIDTH = 5, 4, 6
LEN = TEXT + HEIGHT * WIDTH
PATTERNS = (
    masks.image_rows(TEXT, HEIGHT, WIDTH),
    masks.image_columns(TEXT, HEIGHT, WIDTH),
    masks.image_neighbors(TEXT, HEIGHT, WIDTH, (1, 2)),
    masks.Causal() & (masks.Prefix(TEXT) | masks.Window(WIDTH, 0).after(TEXT)),  # rows as the paper has them
)


def sees(layer: int, i: int, j: int) -> bool:
    """Return whether a pair is allowed by the pattern of a layer, by rows and columns of plain ints."""
    if j > i or i < TEXT or j < TEXT:
        return j <= i
    (y, x), (v, u) = divmod(i - TEXT, WIDTH), divmod(j - TEXT, WIDTH)
    return (y == v, x == u, y - v <= 1 and abs(x - u) <= 2, i - j <= WIDTH)[layer]


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "max_len": LEN, "embed_dim": 16, "num_heads": 2, "num_layers": 4, "feed_forward_dim": 24}
    decoder = Decoder(DecoderConfig(**sizes, position_encoding="learned")).double().eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for layer, mask in zip(decoder.stack.layers, PATTERNS, strict=True):
        layer.attention.mask = mask
    return decoder


def test_each_layer_sees_what_its_pattern_says(model: Decoder) -> None:
    tokens = torch.randint(0, 30, (2, LEN))
    for layer, matrix in enumerate(model.matrices(tokens)):
        wanted = torch.tensor([[sees(layer, i, j) for j in range(LEN)] for i in range(LEN)])
        assert torch.equal(matrix.to_dense() > 0, wanted.expand(2, 2, LEN, LEN))


@pytest.mark.parametrize("lengths", [(TEXT, *(1,) * (LEN - TEXT)), (TEXT + 3, 8, 1, 1, LEN - TEXT - 13)], ids=str)
def test_a_text_and_its_cells_one_by_one_equal_the_full_run(model: Decoder, lengths: tuple[int, ...]) -> None:
    tokens = torch.randint(0, 30, (2, LEN))
    with torch.no_grad():
        cache = model.new_cache()
        parts = [model(part, cache=cache) for part in tokens.split(lengths, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


def test_images_are_generated(model: Decoder) -> None:
    prompt = [1, 2, 3, 4, 5]
    text = list(prompt)
    with torch.no_grad():
        for _ in range(HEIGHT * WIDTH):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert generate(model, [prompt], HEIGHT * WIDTH) == [text[TEXT:]]


@pytest.mark.parametrize("name", ["image_rows", "image_columns", "image_neighbors"])
def test_plans_grow_with_the_image_and_not_with_its_square(name: str) -> None:
    def pairs(side: int) -> float:
        more = (5,) if name == "image_neighbors" else ()
        n = 256 + side * side
        return getattr(masks, name)(256, side, side, *more).plan(n).pairs / n

    # Keys for each query: the text, and as many cells as a side of the image has, or the rows that a radius reaches.
    for side in (64, 128, 256):
        assert pairs(side) <= 256 + (8 if name == "image_neighbors" else 4) * side
