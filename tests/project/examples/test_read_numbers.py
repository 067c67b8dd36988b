"""The example says every number right, writes with caches what it writes without, and goes on where it was stopped."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.models import beam_search

PATH = Path(__file__).parents[3] / "examples" / "read_numbers.py"


@pytest.fixture(scope="module")
def captioner(example):
    torch.manual_seed(0)
    return example.Captioner(example.QUICK).double().eval()


@pytest.fixture
def images(example):
    return torch.rand(3, example.SIDE, example.QUICK.width, dtype=torch.float64)


# --- words -----------------------------------------------------------------------------------------------------------


SAID = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"
)


def _heard(text):
    """The number that English words say, by adding and multiplying as one hears them."""
    value = dict(zip(SAID.split(), [*range(20), *range(20, 100, 10)], strict=True))
    total = below = 0
    for word in re.split("[ -]", text):
        if word == "thousand":
            total, below = total + 1000 * below, 0
        elif word == "hundred":
            below *= 100
        else:
            below += value[word]
    return total + below


def _in_chinese(number):
    """Every place with its unit, then what nobody says is taken out."""
    places = "".join(
        "零一二三四五六七八九"[int(digit)] + unit if digit != "0" else "零"
        for digit, unit in zip(f"{number:04}", "千百十 ", strict=True)
    )
    said = re.sub("零+", "零", places.replace(" ", "")).strip("零")
    return re.sub("^一十", "十", said) or "零"


def test_every_number_is_said_right(example):
    for number in range(10_000):
        english, chinese = (example.as_tokens(number, language) for language in ("en", "zh"))
        assert [example.TOKENS[caption[0]] for caption in (english, chinese)] == ["<en>", "<zh>"]
        assert english[-1] == chinese[-1] == example.END
        text = example.as_text(english[1:-1])
        assert _heard(text) == number
        assert re.fullmatch(r"[a-z]+(ty-[a-z]+)?( [a-z]+(ty-[a-z]+)?)*", text)
        assert example.as_text(chinese[1:-1]) == _in_chinese(number)
        assert max(len(english), len(chinese)) - 1 <= example.LONGEST


@pytest.mark.parametrize(
    "number, english, chinese",
    [
        (0, "zero", "零"),
        (10, "ten", "十"),
        (15, "fifteen", "十五"),
        (40, "forty", "四十"),
        (110, "one hundred ten", "一百一十"),
        (142, "one hundred forty-two", "一百四十二"),
        (1005, "one thousand five", "一千零五"),
        (1050, "one thousand fifty", "一千零五十"),
        (2014, "two thousand fourteen", "二千零一十四"),
        (3900, "three thousand nine hundred", "三千九百"),
        (9999, "nine thousand nine hundred ninety-nine", "九千九百九十九"),
    ],
)
def test_some_numbers_as_they_are_written(example, number, english, chinese):
    said = [example.as_text(example.as_tokens(number, language)[1:-1]) for language in ("en", "zh")]
    assert said == [english, chinese]


# --- pictures --------------------------------------------------------------------------------------------------------


def test_nothing_of_a_test_picture_was_seen_in_training(example):
    train, test = example.load(example.Settings())
    assert (len(train.images), len(test.images)) == (1297, 500)
    both = {image.tobytes() for image in train.images} & {image.tobytes() for image in test.images}
    assert not both
    learned, told = (
        example.compose(digits, 500, example.Settings(), np.random.default_rng(0), held_out=held_out)
        for digits, held_out in ((train, False), (test, True))
    )
    assert not any(example.is_held_out(number) for number in learned.numbers)
    assert all(example.is_held_out(number) for number in told.numbers if number >= 100)
    assert 850 < sum(map(example.is_held_out, range(10_000))) < 1150
    for pictures in (learned, told):
        lengths = [len(str(number)) for number in pictures.numbers]
        assert all(90 < lengths.count(size) < 160 for size in range(1, 5))


def test_a_picture_shows_its_number(example):
    train, _ = example.load(example.QUICK)
    pictures = example.compose(train, 60, example.QUICK, np.random.default_rng(1), held_out=True)
    for image, number, digits in zip(pictures.images, pictures.numbers, pictures.digits, strict=True):
        assert "".join(str(train.labels[digit]) for digit in digits) == str(number)
        left = 0
        for digit in digits:  # from left to right, each after the one before it
            ours = torch.from_numpy(train.images[digit])
            at = [x for x in range(left, image.shape[1] - 7) if torch.equal(image[:, x : x + 8], ours)]
            assert at
            left = at[0] + 8
        assert image.sum() == pytest.approx(float(train.images[digits].sum()), abs=1e-3)


def test_patches_are_squares_row_by_row(example):
    images = torch.arange(2 * 8 * 12).reshape(2, 8, 12)
    cut = example.patches(images, 4)
    assert cut.shape == (2, 6, 16)
    for index in range(6):
        row, column = divmod(index, 3)
        square = images[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert torch.equal(cut[:, index].reshape(2, 4, 4), square)


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(9,), (1,) * 9, (1, 3, 5), (4, 4, 1)])
def test_prefill_and_decode_equal_the_full_run(example, captioner, images, pieces):
    tokens = torch.randint(0, len(example.TOKENS), (3, 9))
    given = captioner.given(images)
    full, cache, first = given(tokens), given.new_cache(), 0
    parts = []
    for size in pieces:
        parts.append(given(tokens[:, first : first + size], cache=cache))
        first += size
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-12, rtol=0.0)
    # The picture is projected once: what the layers remember of it is as long as it was.
    own, across = cache[0].flat
    assert (own.length, across.length) == (9, 2 * example.QUICK.width // 4)


def test_the_likeliest_token_is_written(example, captioner, images):
    for language in ("en", "zh"):
        written = example.write(captioner, images, language)
        assert len({tuple(words) for words in written}) > 1 or len(written[0]) > 0
        for image, words in zip(images, written, strict=True):
            tokens = [example.TOKEN_OF[f"<{language}>"]]
            while len(tokens) <= example.LONGEST:
                best = int(captioner.given(image[None])(torch.tensor([tokens]))[0, -1].argmax())
                if best == example.END:
                    break
                tokens.append(best)
            assert words == tokens[1:]


def test_beams_carry_the_picture_along(example, captioner, images):
    start = [[example.TOKEN_OF["<en>"]]] * 3
    (greedy, *_), *_ = beam_search(captioner.given(images), start, 4, beams=1)
    wide = beam_search(captioner.given(images), start, 4, beams=3)
    for image, own in zip(images, wide, strict=True):
        (alone,) = beam_search(captioner.given(image[None]), start[:1], 4, beams=3)
        assert [one.tokens for one in own] == [one.tokens for one in alone]
    assert len(greedy.tokens) == 4


def test_attention_of_a_word_is_a_distribution_over_the_image(example, captioner, images):
    words, found = example.looks(captioner, images[0], "en")
    (written,) = example.write(captioner, images[:1], "en")
    assert words == [*(example.TOKENS[word] for word in written[:8]), "<end>"]
    assert len(found) == 2
    entropies = []
    for weights in found.values():
        assert weights.shape == (len(words), 2, 10)
        torch.testing.assert_close(weights.sum((1, 2)), torch.ones(len(words), dtype=torch.float64))
        entropies.append(-(weights * weights.log()).sum((1, 2)).mean())
    tokens = torch.tensor([[example.TOKEN_OF["<en>"], *written[:8]]])
    x = captioner.embed(tokens, range(tokens.shape[1]))
    layers = captioner.decoder.cross_matrices(x, captioner.encode(images[:1]))
    heads = torch.cat([matrix.to_dense()[0] for matrix in layers]).detach()
    assert entropies[1] == pytest.approx(float((-heads * heads.log()).sum(-1).mean(-1).min()))
    assert entropies[1] < entropies[0]


# --- the run ---------------------------------------------------------------------------------------------------------


# An untrained model writes in all languages at once, and not every machine has the fonts for it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::saccade.viz.MissingGlyphsWarning")
def test_a_stopped_run_goes_on_and_ends_the_same(example, monkeypatch, tmp_path, capsys):
    steps = []
    run_class = example.study.Run
    learn, save = run_class._learn, run_class._save

    def counting(run):
        steps.append(run.step)
        return learn(run)

    def stop(run):
        save(run)
        raise KeyboardInterrupt("after a checkpoint")

    monkeypatch.setattr(run_class, "_learn", counting)
    whole = example.main(["--quick", "--out", str(tmp_path / "whole")])
    assert steps == list(range(12))
    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(run_class, "_save", stop)
        with pytest.raises(KeyboardInterrupt, match="after a checkpoint"):
            example.main(["--quick", "--out", str(tmp_path / "stopped")])
    assert steps == list(range(5))
    assert example.main(["--quick", "--out", str(tmp_path / "stopped")]) == whole
    assert steps == list(range(12))
    train, _ = example.load(example.QUICK)
    one, other = (example.run_of(0, example.QUICK, train, tmp_path / folder) for folder in ("whole", "stopped"))
    assert one.step == other.step == 12
    for name, own in one.module.state_dict().items():
        assert torch.equal(own, other.module.state_dict()[name])

    assert not list(tmp_path.rglob("*.part"))
    told = json.loads((tmp_path / "whole" / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == whole
    assert told["settings"]["steps"] == 12
    assert (tmp_path / "whole" / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


def test_a_checkpoint_of_other_settings_is_not_used(example, tmp_path):
    settings = dataclasses.replace(example.QUICK, steps=1)
    train, _ = example.load(settings)
    example.run_of(0, settings, train, tmp_path).train()
    assert example.run_of(0, dataclasses.replace(settings, seeds=(0, 1)), train, tmp_path).step == 1
    other = example.run_of(0, dataclasses.replace(settings, learning_rate=1e-4), train, tmp_path)
    assert other.step == 0
    assert other.starts_over


def test_training_learns_from_other_pictures_in_every_step(example, monkeypatch, tmp_path):
    settings = dataclasses.replace(example.QUICK, steps=40, learning_rate=5e-3)
    train, _ = example.load(settings)
    seen, losses = set(), []
    compose = example.compose

    def watching(*arguments, **how):
        pictures = compose(*arguments, **how)
        seen.add(tuple(pictures.numbers))
        return pictures

    monkeypatch.setattr(example, "compose", watching)
    example.run_of(0, settings, train, tmp_path).train(losses.append)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    example.run_of(1, dataclasses.replace(settings, steps=1), train, tmp_path).train(losses.append)
    assert len(seen) == 41


def test_classifiers_read_a_number_right_when_every_digit_is(example):
    train, test = example.load(example.QUICK)
    pictures = example.compose(test, 200, example.QUICK, np.random.default_rng(2), held_out=True)
    for right in example.told_where(train, test, pictures).values():
        assert 0.8 < sum(right) / 200 < 1.0
    # Training numbers are known to the nearest neighbour to the last digit.
    known = example.compose(train, 200, example.QUICK, np.random.default_rng(2), held_out=True)
    assert all(example.told_where(train, train, known)["nearest neighbour"])


def test_a_row_says_shares_by_seed_and_by_length(example):
    pictures = example.Pictures(torch.zeros(4, 8, 40), [7, 12, 15, 1000], [])
    row = example.summarise("who", {"0": [True] * 4, "1": [True, False, True, False]}, pictures)
    assert (row["mean"], row["lowest"], row["highest"]) == (0.75, 0.5, 1.0)
    assert {size: row.get(f"of {size}") for size in range(1, 5)} == {1: 1.0, 2: 0.75, 3: None, 4: 0.5}


def test_a_picture_that_is_not_there_is_refused(example, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--quick", "--out", str(tmp_path), "--picture", "20"])
    assert "--picture must be at least 0 and below 20; got 20." in capsys.readouterr().err
