"""The search of the Chinese site: text in pairs of characters.

Sphinx needs a segmenter for Chinese, and its own code for the browser refers to a stemmer that does not exist. Here a
page contains a Chinese word if it contains all pairs of neighbouring characters of it; a browser splits what is typed
in the same way.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.search import SearchLanguage
from sphinx.search.en import SearchEnglish

sys.path.insert(0, str(Path(__file__).parent))
from han_lines import HAN

_WORDS = re.compile(rf"[{HAN}]+|[a-z0-9_]+")


class SearchChinese(SearchLanguage):
    """Words of Chinese pages: single characters and pairs of them, and words in Latin letters in lower case."""

    lang = "zh"
    language_name = "Chinese"
    stopwords = SearchEnglish.stopwords
    js_splitter_code = """
var splitQuery = (query) =>
  (query.toLowerCase().match(/[\\u3400-\\u4dbf\\u4e00-\\u9fff]+|[a-z0-9_]+/g) || []).flatMap((word) =>
    /^[a-z0-9_]/.test(word) || word.length === 1
      ? [word]
      : Array.from({ length: word.length - 1 }, (_, i) => word.slice(i, i + 2)));
"""

    def split(self, input: str) -> list[str]:  # noqa: A002  Sphinx's name
        """Return the words of a text, and each Chinese character for searches for one."""
        words: list[str] = []
        for word in _WORDS.findall(input.lower()):
            if re.match(rf"[{HAN}]", word):
                words += [*word, *(word[i : i + 2] for i in range(len(word) - 1))]
            else:
                words.append(word)
        return words
