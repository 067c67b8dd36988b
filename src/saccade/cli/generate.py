"""``saccade generate``: continue a text with a language model."""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from saccade.cli.exit_status import loaded, refuse
from saccade.cli.loading import SMALL_DECODER, ModelName, load
from saccade.cli.progress import progress
from saccade.models import Decoder, Sampler, Step, beam_search, stream
from saccade.support.columns import left_aligned, right_aligned
from saccade.support.language import translated
from saccade.text import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the result of decoding incomplete bytes of a character
_AT_ONCE = 512  # number of tokens up to which each token is printed immediately
_Prompt = Annotated[
    list[str],
    typer.Argument(metavar="PROMPT", help="The text to continue; several arguments are joined by spaces."),
]
_Count = Annotated[int, typer.Option(min=1, help="Maximum number of tokens to add.")]
_Temperature = Annotated[
    float | None,
    typer.Option(
        help="Sample tokens; values below 1 favor likely tokens. By default, the most likely token is chosen."
    ),
]
_TopK = Annotated[
    int | None, typer.Option(help="Sample among this number of most likely tokens; by default among all.")
]
_TopP = Annotated[
    float | None,
    typer.Option(help="Sample among the most likely tokens whose probabilities sum to this; by default among all."),
]
_Beams = Annotated[int, typer.Option(min=1, help="Number of beams of a beam search.")]
_Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of the sampling, for reproducible results. By default, each run has a new seed."),
]
_Trace = Annotated[bool, typer.Option("--trace", help="Print the keys and values read and stored in every step.")]


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

    A folder must contain config.json, safetensors and tokenizer.json of a GPT-2, Llama, Mistral or Qwen2 model.

    The text goes to standard output token by token, or at the end with --beams or --trace; progress and --trace go to
    standard error. Ctrl-C stops the generation and keeps the text so far.
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
        refuse("generate", "PROMPT must have at least one token; got none")

    console, stop = Console(stderr=True, highlight=False, markup=False, emoji=False), decoder.config.end_tokens
    printer = TextPrinter(tokenizer, tokens, at_once=not trace)
    try:
        if beams > 1:
            with progress(console, "tokens", None):
                new = iter(beam_search(decoder, [tokens], max_new_tokens, beams=beams, stop=stop)[0][0].tokens)
        else:
            steps = stream(decoder, [tokens], max_new_tokens, sampler=sampler, stop=stop, seed=seed)
            if trace or not sys.stdout.isatty():  # on a terminal the text itself shows the progress
                steps = _with_progress_bar(console, steps, max_new_tokens)
            new = _without_end_token(_traced(console, steps, tokenizer) if trace else steps, stop)
        for token in new:
            printer.add(token)
    except KeyboardInterrupt:
        printer.break_off()
        raise
    except ValueError as error:
        printer.break_off()
        refuse("generate", str(error).partition("\n")[0])
    printer.finish()


def _check_options(sampler: Sampler | None, max_new_tokens: int, beams: int, seed: int | None, *, trace: bool) -> None:
    """Refuse combinations of options of ``saccade generate`` that are not supported."""
    if beams > 1 and sampler is not None:
        refuse("generate", "--beams must be 1 if tokens are sampled; remove --temperature, --top-k and --top-p")
    if beams > 1 and trace:
        refuse("generate", "--trace must be used with one beam; a beam search runs several texts at once")
    if seed is not None and sampler is None:
        refuse(
            "generate", "--seed must be used with --temperature, --top-k or --top-p; without them nothing is sampled"
        )
    for option, number in (("--max-new-tokens", max_new_tokens), ("--beams", beams), ("--seed", seed)):
        if number is not None and number > sys.maxsize:
            refuse("generate", f"{option} must be at most {sys.maxsize}; got {number}")


def _without_end_token(steps: Iterable[Step], stop: Collection[int]) -> Iterator[int]:
    """Yield the generated tokens of one text, without the token that ends it."""
    for step in steps:
        token = int(step.tokens[0])
        if token not in stop:
            yield token


def _traced(console: Console, steps: Iterable[Step], tokenizer: "Tokenizer") -> Iterator[Step]:
    """Yield the decoding steps of a generation, printing one line for each step."""
    heads = map(translated, ("step", "phase", "tokens", "K,V read", "appended", "chosen"))
    console.print(_trace_line(*heads))
    for number, step in enumerate(steps):
        read, appended = (_bytes(count) for count in (step.bytes_read, step.bytes_appended))
        token = visible(repr(tokenizer.decode([int(step.tokens[0])], skip_special_tokens=False)))
        line = _trace_line(str(number), translated(step.phase), str(step.processed), read, appended, token)
        console.print(line, soft_wrap=True)
        yield step


def _trace_line(number: str, phase: str, tokens: str, read: str, appended: str, token: str) -> str:
    sizes = right_aligned(tokens, 6), right_aligned(read, 10), right_aligned(appended, 10)
    return "  ".join((right_aligned(number, 5), left_aligned(phase, 7), *sizes, token))


def _with_progress_bar(console: Console, steps: Iterable[Step], most: int) -> Iterator[Step]:
    """Yield the decoding steps of a generation while showing a progress bar."""
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
    model = loaded("generate", load, name)
    if not isinstance(model, Decoder):
        refuse("generate", f"--model must be a language model; got {name}, an encoder")
    return model


class TextPrinter:
    """A printer that writes a generated text to standard output while its tokens arrive.

    Args:
        tokenizer: the tokenizer that decodes the tokens.
        tokens: the beginning of the text; it is printed with the first new token.
        at_once: whether to print tokens as they arrive; if False, all of them are printed at the end.

    Cost: every print decodes the full text, because the text of a token depends on the tokens before it. In a long
    text, several tokens are printed together, so that printing remains cheaper than generation.
    """

    def __init__(self, tokenizer: "Tokenizer", tokens: Sequence[int], *, at_once: bool = True):
        self._tokenizer, self._tokens, self._at_once = tokenizer, list(tokens), at_once
        self._printed, self._waiting = "", 0

    def add(self, token: int) -> None:
        """Add a generated token, and print the text if enough tokens are waiting to be printed."""
        self._tokens.append(token)
        self._waiting += 1
        if self._at_once and self._waiting > len(self._tokens) // _AT_ONCE:
            self._print(self._text().rstrip(_UNFINISHED))

    def finish(self) -> None:
        """Print the rest of the generated text and end the line."""
        text = self._text()
        # Some tokenizers join words late, so that the text no longer begins with the printed part: print it again.
        self._print(text if text.startswith(self._printed) else f"{self._printed}\n{text}")
        typer.echo()

    def break_off(self) -> None:
        """Print the rest of the text except an incomplete last character; end the line if any text was printed."""
        if self._waiting:
            self._print(self._text().rstrip(_UNFINISHED))
        if self._printed:
            typer.echo()

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens)

    def _print(self, text: str) -> None:
        if text.startswith(self._printed):
            new = text[len(self._printed) :]
            self._printed, self._waiting = text, 0  # first, because printing to a full pipe may be interrupted
            typer.echo(visible_text(new), nl=False)  # flushes


def visible_text(text: str) -> str:
    """Escape the control characters of a generated text, except line breaks and tabs."""
    return re.sub(r"[^\n\t]+", lambda match: visible(match.group()), text)
