"""transformers models in compiled and exported programs: the same numbers, and as many graphs as with SDPA."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.sampled import kept, sampled
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export
from transformers.generation.configuration_utils import CompileConfig

import saccade as sc
from saccade import masks
from saccade.integrations.transformers import install

pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {"num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "eos_token_id": None}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": None, "pad_token_id": 0}
LAYERS = ["sliding_attention", "full_attention"]

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, **DECODER, sliding_window=6)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, **DECODER, head_dim=8, sliding_window=6, layer_types=LAYERS)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
}
DECODERS = ["llama", "gpt2"]  # a static cache of sliding windows counts in numbers, so it is compiled for every token


def _model(name: str, implementation: str = "saccade") -> Any:
    torch.manual_seed(0)
    install()
    model = MODELS[name]().eval()
    model.set_attn_implementation(implementation)
    return model


def _inputs(name: str, n: int, padding: str = "none") -> dict[str, Any]:
    tokens = torch.ones(2, n, dtype=torch.long)
    if padding != "none":
        tokens[0, slice(0, 3) if padding == "left" else slice(n - 3, n)] = 0
    inputs: dict[str, Any] = {"input_ids": torch.randint(1, 64, (2, n))}
    if padding == "dense":
        inputs["attention_mask"] = torch.ones(2, 1, n, n, dtype=torch.bool).tril() & tokens.bool()[:, None, None]
        inputs["attention_mask"] |= torch.eye(n, dtype=torch.bool)
    elif padding == "float":
        hidden = ~torch.ones(2, 1, n, n, dtype=torch.bool).tril()
        inputs["attention_mask"] = torch.randn(2, 1, n, n).masked_fill(hidden, torch.finfo(torch.float32).min)
    elif padding == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(4), torch.arange(n - 4)])[None].expand(2, -1)
    elif padding != "none":
        inputs["attention_mask"] = tokens
    if name == "t5":
        inputs["decoder_input_ids"] = torch.randint(1, 64, (2, n - 2))
    return inputs if name == "bert" else inputs | {"use_cache": False}


def _counted(model: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True), counter


CASES = [(name, "right" if name in ("bert", "t5") else "left") for name in MODELS]
CASES += [("llama", "none"), ("llama", "packed"), ("llama", "dense"), ("mistral", "packed"), ("mistral", "right")]
QUICK = [("llama", "left")]  # each takes half a minute


@pytest.mark.parametrize(
    ("name", "padding"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_compiled_models_run_and_train_at_every_length(name: str, padding: str) -> None:
    model = _model(name)
    compiled, counter = _counted(model)
    for n in (9, 12, 15, 10):
        inputs = _inputs(name, n, padding)
        results = []
        for run in (compiled, model):
            model.zero_grad()
            logits = run(**inputs).logits
            logits.sin().sum().backward()
            results.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_ten_lengths_take_as_many_graphs_as_with_sdpa(name: str) -> None:
    counts = []
    for implementation in ("sdpa", "saccade"):
        compiled, counter = _counted(_model(name, implementation))
        with torch.no_grad():
            for n in range(8, 18):
                compiled(**_inputs(name, n, "left"))
        counts.append(counter.frame_count)
    assert counts[1] <= counts[0] == 2


EAGER = [pytest.param(*case) for case in (("mistral", "left"), ("gpt2", "packed"), ("llama", "float"))]


@pytest.mark.parametrize(("name", "padding"), kept(EAGER, "llama"))
def test_the_numbers_are_those_of_sdpa(name: str, padding: str) -> None:
    inputs = _inputs(name, 11, padding)
    compiled, _ = _counted(_model(name))
    with torch.no_grad():
        theirs = _model(name, "sdpa")(**inputs).logits
        torch.testing.assert_close(compiled(**inputs).logits[:, 3:], theirs[:, 3:])


PATTERN = masks.Window(2, 0) | masks.Global([0])
PATTERNED = [(name, how, kind) for name in DECODERS for how in ("install", "replace") for kind in ("packed", "dense")]


def _set_pattern(model: Any, how: str) -> None:
    if how == "install":
        model.set_attn_implementation(install("saccade-pattern", mask=PATTERN))
    else:
        sc.replace_attention(model, mask=PATTERN)


@pytest.mark.parametrize(("name", "how", "kind"), kept([pytest.param(*case) for case in PATTERNED], "gpt2"))
def test_a_pattern_of_a_compiled_model_equals_a_dense_mask_of_sdpa(name: str, how: str, kind: str) -> None:
    model, other = _model(name), _model(name, "sdpa")
    _set_pattern(model, how)
    compiled, counter = _counted(model)
    for n in (9, 12, 10):
        inputs = _inputs(name, n, kind)
        text = inputs.get("position_ids", torch.arange(n)[None]).eq(0).cumsum(1)[:, None]
        place = torch.arange(n) - (text[..., None] > text[:, :, None]).sum(-1)  # in its text
        q, kv = place[..., None], place[:, :, None]
        seen = (text[..., None] == text[:, :, None]) & ((kv <= q) & (q - kv <= 2) | (kv == 0) | (q == 0))
        theirs = dict(inputs)
        theirs["attention_mask"] = seen & inputs.get("attention_mask", torch.ones(n, n, dtype=torch.bool).tril())
        results = []
        for run, arguments in ((compiled, inputs), (other, theirs)):
            logits = run(**arguments).logits
            logits.sin().sum().backward()
            weights = [x for x in (model if run is compiled else other).parameters() if x.grad is not None]
            results.append((logits.detach(), [x.grad.clone() for x in weights]))
            for x in weights:
                x.grad = None
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("padding", sampled(["packed", "left", "none"], 3))
def test_a_pattern_starts_with_each_text_in_a_compiled_model(padding: str) -> None:
    model = _model("llama")
    model.set_attn_implementation(install("saccade-first", mask=masks.Window(2, 0) | masks.Global([0])))
    compiled, counter = _counted(model)
    with torch.no_grad():
        for n in (9, 12, 10):
            inputs = _inputs("llama", n, padding)
            torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)
    assert counter.frame_count <= 2


def _generated(model: Any, padding: str, **options: Any) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.ones(2, 7, dtype=torch.long)
    if padding == "left":
        tokens[0, :3] = 0
    out: Tensor = model.generate(
        torch.randint(3, 64, (2, 7)), attention_mask=tokens, max_new_tokens=12, do_sample=False, **options
    )
    return out


@pytest.mark.parametrize(
    ("name", "padding"), sampled([pytest.param(x, y) for x in DECODERS for y in ("left", "none")], 4)
)
def test_generation_with_a_static_cache_is_compiled_once(name: str, padding: str) -> None:
    model = _model(name)
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    out = _generated(model, padding, cache_implementation="static", compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(out, _generated(model, padding))


@pytest.mark.slow
def test_a_pattern_follows_the_position_in_a_static_cache() -> None:
    model = _model("llama")
    model.set_attn_implementation(install("saccade-near", mask=masks.Window(2, 0) | masks.Global([0])))
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True
    torch.compiler.reset()
    out = _generated(model, "left", cache_implementation="static", compile_config=config)
    torch.testing.assert_close(out, _generated(model, "left"))


@pytest.mark.slow
def test_generation_with_a_dynamic_cache_takes_few_graphs() -> None:
    model = _model("llama")
    torch.compiler.reset()
    expected = _generated(model, "left")
    counter = CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True)
    torch.testing.assert_close(_generated(model, "left"), expected)
    assert counter.frame_count <= 4


RELOADED = """
import sys, torch, saccade
program = torch.export.load(sys.argv[1]).module()
inputs, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program(*inputs), expected)
"""


class Logits(torch.nn.Module):
    """A model without a cache, with tensors as arguments; ``where`` is named ``argument``."""

    def __init__(self, name: str, argument: str = "attention_mask"):
        super().__init__()
        self.model, self.argument = _model(name), argument
        self.model.config.use_cache = False

    def forward(self, input_ids: Tensor, where: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        more = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        logits: Tensor = self.model(input_ids=input_ids, **{self.argument: where}, **more).logits
        return logits


def tensors_of(name: str, n: int) -> tuple[Tensor, ...]:
    """Return the arguments of `Logits` for ``n`` tokens."""
    inputs = _inputs(name, n, "right" if name in ("bert", "t5") else "left")
    return tuple(x for x in inputs.values() if isinstance(x, Tensor))


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "llama" else pytest.mark.slow) for x in MODELS])
def test_exported_models_run_at_other_lengths_in_a_new_process(name: str, tmp_path: Path) -> None:
    model, length = Logits(name).eval(), Dim("length", min=4, max=512)
    shapes = ({1: length}, {1: length}, {1: Dim("target", min=2, max=512)})[: 3 if name == "t5" else 2]
    with torch.no_grad():
        program = export(model, tensors_of(name, 9), dynamic_shapes=shapes, strict=False)
        torch.export.save(program, tmp_path / "model.pt2")
        other = tensors_of(name, 14)
        torch.save((other, model(*other)), tmp_path / "expected.pt")
    command = [sys.executable, "-c", RELOADED, str(tmp_path / "model.pt2"), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "kind"), PATTERNED)
def test_a_pattern_is_exported_with_a_model(name: str, how: str, kind: str) -> None:
    model, length = (
        Logits(name, "position_ids" if kind == "packed" else "attention_mask"),
        Dim("length", min=6, max=512),
    )
    _set_pattern(model.model, how)
    inputs = [tuple(x for x in _inputs(name, n, kind).values() if isinstance(x, Tensor)) for n in (9, 14)]
    shapes = ({1: length}, {1: length} if kind == "packed" else {2: length, 3: length})
    with torch.no_grad():
        program = export(model, inputs[0], dynamic_shapes=shapes, strict=False).module()
        for tensors in inputs:
            torch.testing.assert_close(program(*tensors), model(*tensors))
