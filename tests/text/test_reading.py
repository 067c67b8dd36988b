"""Word pieces become the words that were written."""

from dataclasses import dataclass

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from saccade.text import Word, words

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "token",
    "##ization",
    "##s",
    "don",
    "'",
    "t",
    "3",
    ".",
    "14",
]
PIECES += [",", "naive", "et", "##ude", "小", "new", "york"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def read(tokenizer: Tokenizer, text: str | list[str]) -> tuple[Word, ...]:
    return words(tokenizer.encode(text, is_pretokenized=not isinstance(text, str)), text)


def test_pieces_become_words_spelled_as_written(tokenizer):
    found = read(tokenizer, "The Tokenization, cats")
    assert found == (
        Word("[CLS]", 0, 1, special=True),
        Word("The", 1, 2),
        Word("Tokenization", 2, 4),
        Word(",", 4, 5),
        Word("cats", 5, 7),
        Word("[SEP]", 7, 8, special=True),
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Don't", ["Don't"]),
        ("don’t", ["don’t"]),
        ("don ' t", ["don", "'", "t"]),
        ("the 'cat' naive", ["the", "'", "cat", "'", "naive"]),
        ("don 't", ["don", "'", "t"]),
        ("don' t", ["don", "'", "t"]),
        ("3 .14", ["3", ".", "14"]),
        ("3.14", ["3.14"]),
        ("3,14,3", ["3,14,3"]),
        ("cat.the", ["cat", ".", "the"]),
        ("cat 3.", ["cat", "3", "."]),
        ("don't't", ["don't't"]),
        ("naïve cat", ["naïve", "cat"]),
        ("e\u0301tude\u0301 cat", ["e\u0301tude\u0301", "cat"]),
        ("小小", ["小", "小"]),
        ("", []),
        ("   ", []),
    ],
)
def test_contractions_numbers_and_accents_stay_whole(tokenizer, text, expected):
    found = read(tokenizer, text)
    assert [word.text for word in found] == ["[CLS]", *expected, "[SEP]"]
    assert [word.start for word in found] == [0, *(word.stop for word in found)][:-1]


def test_unknown_words_are_flagged_also_by_one_piece_of_many(tokenizer):
    flags = {word.text: word.unknown for word in read(tokenizer, ["小狗", "狗小", "小", "dog", "cat", "dog's"])}
    assert flags == {
        "[CLS]": False,
        "小狗": True,
        "狗小": True,
        "小": False,
        "dog": True,
        "cat": False,
        "dog's": True,
        "[SEP]": False,
    }
    joined = read(tokenizer, "dog't")[1]
    assert joined == Word("dog't", 1, 4, unknown=True)


def test_given_words_stay_as_given(tokenizer):
    found = read(tokenizer, ["New York", "don't", "3.14"])
    assert [word.text for word in found] == ["[CLS]", "New York", "don't", "3.14", "[SEP]"]
    assert [(word.start, word.stop) for word in found] == [(0, 1), (1, 3), (3, 6), (6, 9), (9, 10)]


def test_a_given_word_that_leaves_no_token_is_refused(tokenizer):
    with pytest.raises(
        ValueError,
        match=r"words: every given word must leave at least one token; got nothing for '' \(word 2\)",
    ):
        read(tokenizer, ["cat", "", "cat"])


def test_a_special_token_next_to_text_is_never_part_of_a_word():
    @dataclass
    class Handmade:
        tokens = ["3", ".", "3"]
        word_ids = [0, None, 1]
        offsets = [(0, 1), (1, 2), (2, 3)]

    assert [word.text for word in words(Handmade(), "3.3")] == ["3", ".", "3"]
