"""``--help`` in a terminal of 80 columns: nothing is cut, and every option says what it is without being given."""

import re

import pytest
import typer
from typer.testing import CliRunner

from saccade.cli.app import app

GROUP = typer.main.get_command(app)
COMMANDS = GROUP.commands
OPTIONS = [
    (name, option) for name, command in COMMANDS.items() for option in command.params if option.opts[0][0] == "-"
]
IS_NUMBER = re.compile("<int|<float|GIB")
SAYS_WITHOUT = re.compile("default|else|left out|required")


@pytest.fixture
def printed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")

    def help_of(*command):
        result = CliRunner().invoke(app, [*command, "--help"])
        assert result.exit_code == 0
        return result.output

    return help_of


def joined(text):
    """Return a text as one line, since its line breaks do not matter here."""
    return " ".join(text.split())


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=lambda command: " ".join(command) or "-")
def test_lines_fit_and_nothing_is_cut(printed, command):
    text = printed(*command)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    described = text.partition("Options:")[2]
    assert "..." not in described.replace("N,N,...", "")


def test_the_list_of_commands_says_what_each_does(printed):
    text = printed()
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.short_help)}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "option"), OPTIONS, ids=lambda each: each if isinstance(each, str) else each.opts[0]
)
def test_an_option_stands_whole_with_its_description(printed, command, option):
    text = printed(command)
    for name in option.opts:
        assert re.search(rf"^  {name}\s", text, re.MULTILINE)
    assert option.help
    assert option.help.endswith(".")
    assert joined(option.help) in joined(text)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_number_says_what_holds_without_it(printed, command):
    options = re.split(r"^  (?=--)", printed(command), flags=re.MULTILINE)[1:]
    numbers = [text for text in options if IS_NUMBER.search(text)]
    assert numbers
    assert [text for text in numbers if not SAYS_WITHOUT.search(text)] == []


def test_there_is_something_to_hold():
    assert set(COMMANDS) == {"look", "compare", "generate", "verify", "audit", "judge", "cost"}
    assert len(OPTIONS) > 50
