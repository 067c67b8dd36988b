"""Generation: the loop, sampling and beams, each against a definition written here or in transformers."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from saccade import masks, nn
from saccade.caches import Cache, KVCache
from saccade.models import Decoder, DecoderConfig, Sampler, beam_search, generate, stream

VOCAB = 7
PROMPTS = [[1, 2, 3, 4, 5], [6, 1], [3, 3, 0]]


def _model(position_encoding: str = "rotary", **options: object) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=VOCAB,
        max_len=64,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        num_layers=2,
        feed_forward_dim=24,
        position_encoding=position_encoding,
        **options,
    )
    model = Decoder(config).double().eval()
    for parameter in model.parameters():  # a start small enough to train from would make all tokens alike
        torch.nn.init.normal_(parameter, std=0.7)
    return model


def _alone(model: Decoder, text: list[int]) -> Tensor:
    """Logits at the last token, read in one go: ``[vocab]``."""
    with torch.no_grad():
        return model(torch.tensor([text]))[0, -1]


def _without_cache(model: Decoder) -> Callable[..., Tensor]:
    return lambda tokens, positions: model(tokens, positions=positions)


@pytest.mark.parametrize("form", [lambda m: m, _without_cache], ids=["cache", "anew"])
@pytest.mark.parametrize("encoding", ["rotary", "learned", "alibi", "relative"])
def test_greedy_is_the_likeliest_token_each_time(
    encoding: str, form: Callable[[Decoder], Callable[..., Tensor]]
) -> None:
    model = _model(encoding)
    expected = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(6):
            text.append(int(_alone(model, text).argmax()))
        expected.append(text[len(prompt) :])
    assert len(set(map(tuple, expected))) > 1
    assert generate(form(model), PROMPTS, 6) == expected
    assert generate(form(model), torch.tensor([[6, 1]]), 6) == expected[1:2]
    assert generate(form(model), PROMPTS, 0) == [[], [], []]


def test_a_window_holds_for_new_tokens_too() -> None:
    model = _model(mask=masks.sliding_window(3))
    text = [1, 2, 3, 4, 5]
    for _ in range(5):
        text.append(int(_alone(model, text).argmax()))
    assert generate(model, [[1, 2, 3, 4, 5]], 5) == [text[5:]]


@pytest.mark.parametrize("form", [lambda m: m, _without_cache], ids=["cache", "anew"])
def test_a_text_ends_before_its_stop_token_and_others_go_on(form: Callable[[Decoder], Callable[..., Tensor]]) -> None:
    model = _model()
    whole = generate(model, PROMPTS, 8)
    for stop in range(VOCAB):
        expected = [text[: text.index(stop)] if stop in text else text for text in whole]
        assert generate(form(model), PROMPTS, 8, stop=stop) == expected
    assert generate(model, PROMPTS, 8, stop=range(VOCAB)) == [[], [], []]
    assert len({len(text) for text in generate(model, PROMPTS, 8, stop=whole[0][3])}) > 1


def test_a_cache_goes_on_where_it_ended() -> None:
    model = _model()
    for prompts in (PROMPTS, [PROMPTS[0]] * 2):
        whole = generate(model, prompts, 9)
        cache = model.new_cache()
        first = generate(model, prompts, 4, cache=cache)
        rest = generate(model, [text[-1:] for text in first], 5, cache=cache)
        assert [a + b for a, b in zip(first, rest, strict=True)] == whole
    cache = model.new_cache()
    generate(model, PROMPTS, 2, cache=cache)
    with pytest.raises(ValueError, match="generate: cache must contain 1 texts, one for each prompt; got 3"):
        generate(model, [[1]], 2, cache=cache)


def test_steps_say_what_they_took() -> None:
    model = _model(mask=masks.sliding_window(4))
    whole = generate(model, PROMPTS, 5)
    stop = whole[1][2]
    assert stop not in whole[0][:4]
    steps = list(stream(model, PROMPTS, 5, stop=stop))
    assert [step.phase for step in steps] == ["prefill"] + ["decode"] * 4
    assert steps[0].processed == sum(map(len, PROMPTS))
    token = 2 * 2 * 2 * 4 * 8  # layers, key and value, kv heads, width, bytes
    assert steps[0].bytes_appended == 3 * 5 * token  # padding takes room too
    assert [step.bytes_appended for step in steps[1:]] == [3 * token] * 4
    assert steps[1].processed == 3 - sum(text[0] == stop for text in whole)
    assert steps[3].tokens[1] == -1
    even = list(stream(model, [[1, 2, 3, 4, 5]], 4))
    assert [step.processed for step in even] == [5, 1, 1, 1]
    assert [step.bytes_read for step in even] == [5 * token] + [4 * token] * 3  # the window, whatever is held
    full = list(stream(_model(), [[1, 2, 3, 4, 5]], 4))
    assert [step.bytes_read for step in full] == [5 * token, 6 * token, 7 * token, 8 * token]
    anew = list(stream(_without_cache(model), [[1, 2]], 3))
    assert [(step.processed, step.bytes_read, step.bytes_appended) for step in anew] == [
        (2, None, None),
        (3, None, None),
        (4, None, None),
    ]


def test_a_stream_stops_when_its_reader_does_and_checks_at_once() -> None:
    model, calls = _model(), []
    handle = model.stack.register_forward_hook(lambda *of: calls.append(of))
    steps = stream(model, PROMPTS, 50)
    assert not calls
    next(steps)
    next(steps)
    handle.remove()
    assert len(calls) == 2
    with pytest.raises(ValueError, match="stream: max_new_tokens must be an int of at least 0; got -1"):
        stream(model, PROMPTS, -1)


@pytest.mark.parametrize("k", [None, 1, 3, 50])
@pytest.mark.parametrize("p", [None, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_probabilities_are_those_of_transformers(k: int | None, p: float | None, temperature: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper  # noqa: PLC0415

    logits = torch.randn(8, 40, dtype=torch.float64) * 2
    expected = TemperatureLogitsWarper(temperature)(None, logits.clone()) if temperature != 1.0 else logits
    if k is not None:
        expected = TopKLogitsWarper(k)(None, expected)
    if p is not None and p < 1.0:
        expected = TopPLogitsWarper(p)(None, expected)
    own = Sampler(temperature, k, p).probabilities(logits)
    torch.testing.assert_close(own, expected.softmax(-1))


def _chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    some = expected > 0
    assert int(counts[~some].sum()) == 0
    return float(((counts - expected)[some] ** 2 / expected[some]).sum())


@pytest.mark.ci
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.5), Sampler(top_k=3), Sampler(1.5, top_p=0.8)], ids=str)
def test_draws_follow_the_probabilities(sampler: Sampler) -> None:
    logits = torch.randn(1, 9)
    probabilities = sampler.probabilities(logits)[0].double()
    tokens, log_probs = sampler.draw(logits.expand(20_000, -1), torch.Generator().manual_seed(5))
    counts = tokens.bincount(minlength=9).double()
    freedom = int((probabilities > 0).sum()) - 1
    assert _chi_square(counts, probabilities) < freedom + 4 * math.sqrt(2 * freedom) + 4
    torch.testing.assert_close(log_probs.exp().double(), probabilities[tokens], rtol=1e-5, atol=1e-6)
    # Successive draws of one row are as independent as rows are.
    generator = torch.Generator().manual_seed(6)
    one_by_one = torch.cat([sampler.draw(logits, generator)[0] for _ in range(2000)])
    assert (
        _chi_square(one_by_one.bincount(minlength=9).double(), probabilities) < freedom + 4 * math.sqrt(2 * freedom) + 4
    )
    pairs = (one_by_one[:-1] * 9 + one_by_one[1:]).bincount(minlength=81).double()
    cells = int((probabilities > 0).sum()) ** 2 - 1
    joint = (probabilities[:, None] * probabilities).flatten()
    likely = joint * len(one_by_one) > 5
    rest = torch.stack([pairs[~likely].sum()]), torch.stack([joint[~likely].sum()])
    statistic = _chi_square(torch.cat([pairs[likely], rest[0]]), torch.cat([joint[likely], rest[1]]))
    assert statistic < cells + 4 * math.sqrt(2 * cells) + 4


def test_a_token_that_cannot_come_is_never_drawn() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    tokens, _ = Sampler().draw(logits.expand(5000, -1), torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {0, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 5e-324])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}], ids=["all", "top_k", "top_p"])
def test_near_zero_only_the_likeliest_stay(temperature: float, options: dict[str, float], dtype: torch.dtype) -> None:
    never = -math.inf
    logits = torch.tensor([[0, 10, 20, 5], [never, -3, never, -90], [-1e30, -1e38, never, -3e38]], dtype=dtype)
    sampler = Sampler(temperature, **options)
    expected = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]], dtype=dtype)
    torch.testing.assert_close(sampler.probabilities(logits), expected, rtol=0, atol=0)
    tokens, log_probs = sampler.draw(logits, torch.Generator().manual_seed(0))
    assert tokens.tolist() == [2, 1, 0]
    assert log_probs.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-40, 5e-324])
def test_near_zero_the_equally_likely_share(temperature: float) -> None:
    logits = torch.tensor([[7.0, 1.0, 7.0, -math.inf]])
    assert Sampler(temperature).probabilities(logits).tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_the_hottest_draws_all_that_can_come_alike() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, -math.inf]])
    expected = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]])
    torch.testing.assert_close(Sampler(1.7e308).probabilities(logits), expected)


def test_the_last_seed_is_a_seed() -> None:
    model = _model()
    draws = [generate(model, PROMPTS, 12, sampler=Sampler(1.5), seed=seed) for seed in (0, 2**63 - 1, 2**63 - 1)]
    assert draws[1] == draws[2] != draws[0]


def test_a_seed_says_all_and_disturbs_nothing() -> None:
    model, sampler = _model(), Sampler(temperature=1.5)
    before = torch.get_rng_state()
    first = generate(model, PROMPTS, 12, sampler=sampler, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert generate(model, PROMPTS, 12, sampler=sampler, seed=3) == first
    assert generate(model, PROMPTS, 12, sampler=sampler, seed=4) != first
    assert generate(_without_cache(model), PROMPTS, 12, sampler=sampler, seed=3) == first
    torch.manual_seed(1)
    free = generate(model, PROMPTS, 12, sampler=sampler)
    assert generate(model, PROMPTS, 12, sampler=sampler) != free
    torch.manual_seed(1)
    assert generate(model, PROMPTS, 12, sampler=sampler) == free
    assert generate(model, PROMPTS, 12, sampler=Sampler(top_k=1), seed=0) == generate(model, PROMPTS, 12)


def _beams_by_hand(
    model: Decoder, prompt: list[int], steps: int, beams: int, stop: set[int], penalty: float
) -> list[tuple[list[int], float]]:
    """Beam search over Python lists, one text at a time, without stopping early."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text for text, _ in live]))[:, -1]
        grown = []
        for (text, total), log_probs in zip(live, logits.log_softmax(-1).tolist(), strict=True):
            grown += [([*text, token], total + log_probs[token]) for token in range(VOCAB)]
        grown.sort(key=lambda one: -one[1])
        for text, total in grown[:beams]:
            if text[-1] in stop:
                done.append((text[:-1], total / step**penalty))
        live = [one for one in grown if one[0][-1] not in stop][:beams]
    done += [(text, total / steps**penalty) for text, total in live]
    return sorted(done, key=lambda one: -one[1])[:beams]


@pytest.mark.ci
@pytest.mark.parametrize("form", [lambda m: m, _without_cache], ids=["cache", "anew"])
@pytest.mark.parametrize("beams", [1, 3, 5])
@pytest.mark.parametrize("stop, penalty", [((), 1.0), ((2,), 1.0), ((2, 5), 0.0), ((2,), 2.0), ((0,), -0.5)])
def test_beams_are_those_found_by_hand(
    beams: int, stop: tuple[int, ...], penalty: float, form: Callable[[Decoder], Callable[..., Tensor]]
) -> None:
    model = _model()
    found = beam_search(form(model), PROMPTS, 5, beams=beams, stop=stop, length_penalty=penalty)
    for prompt, own in zip(PROMPTS, found, strict=True):
        expected = _beams_by_hand(model, prompt, 5, beams, set(stop), penalty)
        assert [one.tokens for one in own] == [text for text, _ in expected]
        torch.testing.assert_close([one.score for one in own], [score for _, score in expected])


def test_enough_beams_find_the_likeliest_text_of_all() -> None:
    model = _model()
    prompt, texts = [1, 2, 3], list(itertools.product(range(VOCAB), repeat=3))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *text] for text in texts]))[:, 2:-1].log_softmax(-1)
    totals = logits.gather(2, torch.tensor(texts)[..., None]).sum((1, 2))
    best = beam_search(model, [prompt], 3, beams=VOCAB**2)[0]
    for own, place in zip(best[:5], totals.topk(5).indices.tolist(), strict=True):
        assert own.tokens == list(texts[place])
        assert own.score == pytest.approx(float(totals[place]) / 3)


def test_one_beam_is_greedy_and_a_given_cache_is_left_alone() -> None:
    model = _model()
    whole = generate(model, PROMPTS, 6)
    assert [found[0].tokens for found in beam_search(model, PROMPTS, 6, beams=1)] == whole
    cache = model.new_cache()
    generate(model, PROMPTS, 3, cache=cache)
    held = cache.length
    rest = beam_search(model, [text[2:3] for text in whole], 3, beams=1, cache=cache)
    assert [found[0].tokens for found in rest] == [text[3:] for text in whole]
    assert cache.length == held


@pytest.mark.parametrize(
    "call, error, sentence",
    [
        (lambda m: generate(m, [], 3), ValueError, "tokens must contain at least one prompt; got none"),
        (lambda m: generate(m, [[1], []], 3), ValueError, "at least one token in every prompt; got none in prompt 1"),
        (lambda m: generate(m, [[1, -1]], 3), ValueError, "tokens must be at least 0; got -1"),
        (lambda m: generate(m, [1, 2], 3), TypeError, r"a list of lists of ints; got a list with 1"),
        (lambda m: generate(m, "abc", 3), TypeError, "list of lists of ints; got str"),
        (lambda m: generate(m, [["a"]], 3), TypeError, "got a prompt with a value that is not an int"),
        (lambda m: generate(m, torch.tensor([1, 2]), 3), TypeError, r"got int64 \[2\]"),
        (lambda m: generate(m, torch.ones(1, 2), 3), TypeError, r"got float32 \[1, 2\]"),
        (lambda m: generate(m, [[1]], 1.5), ValueError, "max_new_tokens must be an int of at least 0; got 1.5"),
        (lambda m: generate(m, [[1]], 3, sampler=0.7), TypeError, "sampler must be a Sampler or None; got float"),
        (
            lambda m: generate(m, [[1]], 3, sampler=Sampler(), seed=-1),
            ValueError,
            r"generate: seed must be an int from 0 to 2\*\*63 - 1, or None; got -1",
        ),
        (lambda m: generate(m, [[1]], 3, sampler=Sampler(), seed=2**63), ValueError, "got 9223372036854775808"),
        (
            lambda m: stream(m, [[1]], 3, sampler=Sampler(), seed=2**70),
            ValueError,
            "stream: seed must be an int from 0",
        ),
        (lambda m: generate(m, [[1]], 3, sampler=Sampler(), seed=True), TypeError, "seed must be an int.*; got True"),
        (lambda m: generate(m, [[1]], 3, sampler=Sampler(), seed="a"), TypeError, "seed must be an int.*; got 'a'"),
        (lambda m: generate(m, [[1]], 3, seed=3), ValueError, "seed must be None without sampling; got 3"),
        (lambda m: generate(m, [[1]], 3, stop="x"), TypeError, "stop must be a token, several tokens or None; got str"),
        (lambda m: generate(m, [[1]], 3, stop=[-2]), ValueError, "stop must be an int of at least 0; got -2"),
        (lambda m: generate(m, [[1]], 3, cache=3), TypeError, r"cache must be a cache from model\.new_cache\(\)"),
        (lambda m: generate(3, [[1]], 3), TypeError, "model must be a model"),
        (lambda m: generate(m, [[VOCAB]], 3), ValueError, "tokens must be from 0 to 6, the vocabulary; got 7"),
        (lambda m: generate(lambda t, positions: t, [[1]], 3), ValueError, r"model must return logits \[1, 1, vocab\]"),
        (
            lambda m: generate(lambda t, positions: torch.full((1, 1, 4), math.nan), [[1]], 3),
            ValueError,
            "model must return finite logits",
        ),
        (lambda m: beam_search(m, [[1]], 3, beams=0), ValueError, "beams must be an int of at least 1; got 0"),
        (lambda m: beam_search(m, [[1]], 0, beams=2), ValueError, "max_new_tokens must be an int of at least 1"),
        (lambda m: beam_search(m, [[1]], 3, beams=2, length_penalty="1"), TypeError, "length_penalty must be a finite"),
        (lambda m: Sampler(0.0), ValueError, "temperature must be a finite number above 0; got 0.0"),
        (lambda m: Sampler(math.inf), ValueError, "temperature must be a finite number above 0"),
        (lambda m: Sampler(math.nan), ValueError, "temperature must be a finite number above 0"),
        (lambda m: Sampler(10**400), ValueError, "temperature must be a finite number above 0; got 1000"),
        (
            lambda m: beam_search(m, [[1]], 3, beams=2, length_penalty=10**400),
            ValueError,
            "length_penalty must be a fin",
        ),
        (lambda m: Sampler("1"), TypeError, "temperature must be a finite number above 0; got '1'"),
        (lambda m: Sampler(top_p=0.0), ValueError, "top_p must be a finite number above 0; got 0.0"),
        (lambda m: Sampler(top_p=1.1), ValueError, "top_p must be above 0 and at most 1"),
        (lambda m: Sampler(top_k=0), ValueError, "top_k must be an int of at least 1; got 0"),
        (lambda m: Sampler(top_k=True), ValueError, "top_k must be an int"),
    ],
)
def test_impossible_arguments_are_refused(
    call: Callable[[Decoder], object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        call(_model())


def test_any_callable_with_a_cache_will_do() -> None:
    """Two attentions without a model around them."""
    torch.manual_seed(0)
    embedding = torch.randn(VOCAB, 8)
    layers = [nn.MultiHeadAttention(8, 2, mask=masks.Causal()).eval() for _ in range(2)]

    def model(tokens: Tensor, *, positions: object = None, cache: Cache | None = None) -> Tensor:
        x = embedding[tokens]
        for layer, own in zip(layers, [None] * 2 if cache is None else cache, strict=True):
            x = x + layer(x, positions=positions, cache=own)
        return x @ embedding.T

    cached = generate(model, PROMPTS, 6, cache=Cache([KVCache(), KVCache()]))
    assert cached == generate(model, PROMPTS, 6)
    assert len(set(map(tuple, cached))) > 1
