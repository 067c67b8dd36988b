"""The Chinese of figures and of the command line: every word that is translated has one, and none is left over."""

import ast
import copy
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import typer

from saccade import masks, theory, viz
from saccade.cli.app import app
from saccade.support.language import Message, chinese, in_language, language_of, one_line, set_language, translated

SOURCES = sorted((Path(__file__).parents[2] / "src" / "saccade").rglob("*.py"))
# Words that are translated where they are drawn, not where they are written.
NAMES = {"key", "query", "weight", "channel", "position", "milliseconds", "median relative error", "word", "sink"}
NAMES |= {"local", "anchor", "rest", "Usage", "Arguments", "Options", "Commands", "default", "required"}
NAMES |= {"Show this message and exit.", "all-MiniLM-L6-v2, or chinese-encoder if most of TEXT is Chinese"}
NAMES |= {"share", "uniform", "given to the first token", "to tokens less than 4 away", "to all others"}
NAMES |= {claim.topic for claim in theory.CLAIMS}
NAMES |= {"to the 2 strongest blocks of 4 among the others"}


# Functions that take the name of a measurement, or a sentence about a kernel, as a literal.
NAMING = {
    "equal",
    "at_most",
    "at_least",
    "apart",
    "same",
    "differ",
    "estimate",
    "near",
    "close",
    "identical",
    "_unless",
}


@cache
def texts():
    """Every literal of the source, and those that are passed to `translated` or `Message` directly."""
    every, passed = set(), set()
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                every.add(node.value)
            functions = {"translated", "Message"}
            if {"theory", "laws"} & set(path.parts):
                functions |= NAMING
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in functions and node.args:
                passed |= {x.value for x in ast.walk(node.args[0]) if isinstance(x, ast.Constant)}
    return every, {text for text in passed if isinstance(text, str) and " " in text}


def helps(command):
    """Every help text of a command and of those below it."""
    found = {command.help, command.epilog, command.short_help, *(getattr(x, "help", None) for x in command.params)}
    for below in getattr(command, "commands", {}).values():
        found |= helps(below)
    return {one_line(text) for text in found if text}


HELPS = helps(typer.main.get_command(app))


@pytest.mark.parametrize("text", sorted(HELPS))
def test_every_help_text_has_its_chinese(text):
    assert re.search(r"[\u4e00-\u9fff]", chinese()[text])


def test_every_translated_sentence_has_its_chinese():
    assert [text for text in texts()[1] if one_line(text) not in chinese()] == []


def test_no_translation_is_left_over():
    used = {one_line(text) for text in texts()[0]} | HELPS | NAMES
    assert [words for words in chinese() if words not in used] == []


@pytest.mark.parametrize("words", [words for words in chinese() if "{" in words])
def test_places_are_kept(words):
    places = [sorted(re.findall(r"\{(\w+(?::[^}]*)?)\}", text)) for text in (words, chinese()[words])]
    assert places[0] == places[1]


def test_the_language_is_english_until_it_is_set():
    assert translated("key") == "key"
    with in_language("zh"):
        assert translated("key") == "键"
        assert translated("layer {layer}, head {head}", layer=1, head=3) == "第 1 层第 3 头"
        assert translated("a name of mine {") == "a name of mine {"
        with in_language("en"):
            assert translated("key") == "key"
    assert translated("key") == "key"
    with pytest.raises(ValueError, match="language must be one of 'en', 'zh'; got 'fr'"):
        set_language("fr")


def test_a_message_is_english_until_it_is_translated():
    message = Message("{strategy}, {rounds} rounds", strategy="fetch", rounds=2)
    with in_language("zh"):
        assert (message, translated(message)) == ("fetch, 2 rounds", "fetch，2 轮")
        assert json.loads(json.dumps(message)) == copy.deepcopy(message) == "fetch, 2 rounds"
        assert translated(copy.deepcopy(message)) == "fetch，2 轮"


def test_names_from_outside_are_never_translated():
    """A module may be called as one of our words is, such as "features" and "heads"."""
    assert "heads" in chinese()
    with in_language("zh"):
        assert translated(Message("no gradient passes through {names}", names="heads")).endswith(" heads")
        assert translated(Message("no gradient passes through {names}", names=Message("heads"))).endswith("头")


@pytest.mark.parametrize(
    "environment, language",
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_language_of_the_system(environment, language):
    assert language_of(environment) == language


def test_figures_name_their_axes_in_the_language_that_is_set():
    weights = torch.rand(4, 4)
    with in_language("zh"):
        figures = viz.heatmap(weights), viz.heatmap(masks.Causal()), viz.heatmap(weights, x_name="mine")
    names = [(figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) for figure in figures]
    assert names == [("键", "查\n询"), ("键", "查\n询"), ("mine", "查\n询")]
    assert viz.heatmap(weights).axes[0].get_xlabel() == "key"
