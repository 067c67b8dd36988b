"""``saccade generate``: continue a text with a language model."""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from saccade.cli.exits import loaded, refuse
from saccade.cli.loading import SMALL_DECODER, ModelName, load
from saccade.cli.progress import progress
from saccade.models import Decoder, Sampler, Step, beam_search, stream
from saccade.text import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a character reads as while some of its bytes are still to come
_AT_ONCE = 512  # tokens up to which each is said as it comes
_Prompt = Annotated[
    list[str],
    typer.Argument(metavar="PROMPT", help="The text to continue; several arguments are joined by spaces."),
]
_Count = Annotated[int, typer.Option(min=1, help="Most tokens to add.")]
_Temperature = Annotated[
    float | None, typer.Option(help="Draw tokens; below 1 the likely becomes likelier. By default the likeliest.")
]
_TopK = Annotated[int | None, typer.Option(help="Draw among so many of the likeliest tokens; by default among all.")]
_TopP = Annotated[
    float | None,
    typer.Option(help="Draw among the likeliest tokens whose probabilities sum to it; by default among all."),
]
_Beams = Annotated[int, typer.Option(min=1, help="Search with so many texts side by side.")]
_Seed = Annotated[
    int | None, typer.Option(min=0, help="Of the draws; the same seed draws the same. By default each run draws anew.")
]
_Trace = Annotated[bool, typer.Option("--trace", help="Say of every step what was read and kept of keys and values.")]


def generate(
    prompt: _Prompt,
    model: ModelName = SMALL_DECODER,
    max_new_tokens: _Count = 64,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    beams: _Beams = 1,
    seed: _Seed = None,
    trace: _Trace = False,
) -> None:
    """Continue a text with a language model: a small one that comes with the package, or one from a folder.

    Folders hold config.json, safetensors and tokenizer.json, in the form of GPT-2, Llama, Mistral or Qwen2.

    The text goes to the standard output as its tokens come, or with --beams and --trace at the end; progress and
    --trace go to the standard error. Ctrl-C ends it with the text as far as it has come.
    """
    sampler = _sampler(temperature, top_k, top_p)
    _check_options(sampler, max_new_tokens, beams, seed, trace=trace)
    text = " ".join(prompt)
    if any("\ud800" <= character <= "\udfff" for character in text):
        refuse("generate", "PROMPT must be valid UTF-8; got bytes that are not")
    decoder = _load(model)
    tokenizer: Tokenizer | None = decoder.tokenizer
    if tokenizer is None:
        refuse("generate", f"--model must have a tokenizer.json; got {model}")
    tokens = tokenizer.encode(text).ids
    if not tokens:
        refuse("generate", "PROMPT must have at least one token; got nothing to go on from")

    console, stop = Console(stderr=True, highlight=False, markup=False, emoji=False), decoder.config.end_tokens
    speaker = Speaker(tokenizer, tokens, at_once=not trace)
    try:
        if beams > 1:
            with progress(console, "tokens", None):
                new = iter(beam_search(decoder, [tokens], max_new_tokens, beams=beams, stop=stop)[0][0].tokens)
        else:
            steps = stream(decoder, [tokens], max_new_tokens, sampler=sampler, stop=stop, seed=seed)
            if trace or not sys.stdout.isatty():  # on a terminal the text itself shows how far it is
                steps = _counted(console, steps, max_new_tokens)
            new = _new(_traced(console, steps, tokenizer) if trace else steps, stop)
        for token in new:
            speaker.hear(token)
    except KeyboardInterrupt:
        speaker.break_off()
        raise
    except ValueError as error:
        speaker.break_off()
        refuse("generate", str(error).partition("\n")[0])
    speaker.finish()


def _check_options(sampler: Sampler | None, max_new_tokens: int, beams: int, seed: int | None, *, trace: bool) -> None:
    """Refuse options that do not go together."""
    if beams > 1 and sampler is not None:
        refuse("generate", "--beams must be 1 where tokens are drawn; take off --temperature, --top-k and --top-p")
    if beams > 1 and trace:
        refuse("generate", "--trace must be used with one beam; beams are searched for several texts at once")
    if seed is not None and sampler is None:
        refuse("generate", "--seed must go with --temperature, --top-k or --top-p; without them nothing is drawn")
    for option, number in (("--max-new-tokens", max_new_tokens), ("--beams", beams), ("--seed", seed)):
        if number is not None and number > sys.maxsize:
            refuse("generate", f"{option} must be at most {sys.maxsize}; got {number}")


def _new(steps: Iterable[Step], stop: Collection[int]) -> Iterator[int]:
    """The tokens of one text, without the token that ends it."""
    for step in steps:
        token = int(step.tokens[0])
        if token not in stop:
            yield token


def _traced(console: Console, steps: Iterable[Step], tokenizer: "Tokenizer") -> Iterator[Step]:
    """The steps, with a line for each that says it in words."""
    console.print(f"{'step':>5}  {'phase':<7}  {'tokens':>6}  {'K,V read':>10}  {'appended':>10}  chosen")
    for number, step in enumerate(steps):
        read, appended = (_bytes(count) for count in (step.bytes_read, step.bytes_appended))
        said = visible(repr(tokenizer.decode([int(step.tokens[0])], skip_special_tokens=False)))
        line = f"{number:>5}  {step.phase:<7}  {step.processed:>6}  {read:>10}  {appended:>10}  {said}"
        console.print(line, soft_wrap=True)
        yield step


def _counted(console: Console, steps: Iterable[Step], most: int) -> Iterator[Step]:
    """The steps, with a bar that says how far they are."""
    with progress(console, "tokens", most) as advance:
        for step in steps:
            advance()
            yield step


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _sampler(temperature: float | None, top_k: int | None, top_p: float | None) -> Sampler | None:
    if temperature is None and top_k is None and top_p is None:
        return None
    try:
        return Sampler(1.0 if temperature is None else temperature, top_k, top_p)
    except ValueError as error:
        refuse("generate", str(error).partition("\n")[0])


def _load(name: str) -> Decoder:
    found = loaded("generate", load, name)
    if not isinstance(found, Decoder):
        refuse("generate", f"--model must be a language model; got {name}, an encoder")
    return found


class Speaker:
    """Prints a text to the standard output, as far as its tokens are known.

    Args:
        tokenizer: makes text of tokens.
        tokens: what the text begins with; it is said with the first token that comes.
        at_once: say tokens as they come; else all of them at the end.

    Cost: every token reads the whole text again, since what a token says depends on those before it. In a long text a
    few are therefore awaited, so that to say it stays cheaper than to make it.
    """

    def __init__(self, tokenizer: "Tokenizer", tokens: Sequence[int], *, at_once: bool = True):
        self._tokenizer, self._tokens, self._at_once = tokenizer, list(tokens), at_once
        self._said, self._awaited = "", 0

    def hear(self, token: int) -> None:
        """One more token."""
        self._tokens.append(token)
        self._awaited += 1
        if self._at_once and self._awaited > len(self._tokens) // _AT_ONCE:
            self._say(self._text().rstrip(_UNFINISHED))

    def finish(self) -> None:
        """Say what is left, and end the line."""
        text = self._text()
        # Some tokenizers join words in the end that stood apart: what has been said cannot be taken back.
        self._say(text if text.startswith(self._said) else f"{self._said}\n{text}")
        typer.echo()

    def break_off(self) -> None:
        """Say what has come but for a character of which bytes are missing, and end the line, if there is one."""
        if self._awaited:
            self._say(self._text().rstrip(_UNFINISHED))
        if self._said:
            typer.echo()

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens)

    def _say(self, text: str) -> None:
        if text.startswith(self._said):
            new = text[len(self._said) :]
            self._said, self._awaited = text, 0  # before it is said: an interruption may come while a pipe is full
            typer.echo(visible_text(new), nl=False)  # and flushed


def visible_text(text: str) -> str:
    """The text as it is, but for characters that a terminal would obey."""
    return re.sub(r"[^\n\t]+", lambda found: visible(found.group()), text)
