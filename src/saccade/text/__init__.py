"""Convert tokens to readable text: join word pieces into words, and make labels that are safe to display."""

from saccade.text.detokenize import spelled
from saccade.text.labels import shorten, visible
from saccade.text.locate_words import locate
from saccade.text.words import Word, merge, words

__all__ = ["Word", "words", "merge", "locate", "visible", "shorten", "spelled"]
