"""Word pieces become the words that were written."""

from dataclasses import dataclass

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

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


def llama(form: str) -> Tokenizer:
    """Pieces as SentencePiece makes them: a text is one piece before it is cut, and a space is a letter."""
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat"), ("▁", "▁")]
    known = ["<unk>", "<0x0A>", "<0x09>", *"▁thecasno.小", *("".join(pair) for pair in merges)]
    byte = [f"<0x{number:02X}>" for number in range(256)] if form == "bytes" else []
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*known, *byte]))}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if form == "metaspace":
        made.pre_tokenizer = pre_tokenizers.Metaspace(split=False, prepend_scheme="first")
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


@pytest.mark.parametrize("form", ["metaspace", "normalizer", "bytes"])
@pytest.mark.parametrize(
    "text, expected",
    [
        ("the cats", ["the", "cats"]),
        ("the\nno the", ["the", "\n", "no", "the"]),
        ("the\n\n\tcat", ["the", "\n", "\n", "\t", "cat"]),
        ("小小 the", ["小", "小", "the"]),
        ("cat.\n", ["cat.", "\n"]),
    ],
)
def test_a_tokenizer_without_words_has_those_between_spaces(form, text, expected):
    made = llama(form)
    found = words(made.encode(text), text, unknown="<unk>")
    assert [word.text for word in found] == expected
    assert [word.start for word in found] == [0, *(word.stop for word in found)][:-1]


def test_an_unknown_word_is_one_unknown_token_between_spaces():
    text = "the 狗看见 了 cat"
    found = words(llama("metaspace").encode(text), text, unknown="<unk>")
    assert [(word.text, word.unknown) for word in found] == [
        ("the", False), ("狗看见", True), ("了", True), ("cat", False),
    ]  # fmt: skip
    found = words(llama("bytes").encode(text), text, unknown="<unk>")
    assert [word.text for word in found] == ["the", *"狗看见了", "cat"]
    assert not any(word.unknown for word in found)


@pytest.mark.parametrize("trims", [True, False])
def test_line_breaks_tabs_and_spaces_alone_stay_in_what_is_read(trims):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ĊĊ", "ĠĠ", ".Ċ"]
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), (".", "Ċ")]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    split = pre_tokenizers.Split(
        Regex(r"\p{L}+|[^\s\p{L}]+\n*|\s+"), "isolated"
    )  # punctuation takes line breaks, as Qwen's
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.post_processor = processors.ByteLevel(trim_offsets=trims)
    text = "a.\nb\t\tc\n\nd  e"
    found = [word.text for word in words(made.encode(text), text)]
    assert found == ["a", ".\n", "b", "\t", "\t", "c", "\n\n", "d", "  ", "e"]
