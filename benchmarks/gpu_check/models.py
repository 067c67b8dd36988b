"""Whole models of transformers in bfloat16: audit, record, a training step, and text from a static cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import saccade as sc
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import Context
from saccade import masks

__all__ = ["MODELS", "measure"]

_WORDS, _WINDOW = 200, 32
_SIZES: dict[str, dict[str, int]] = {
    "cuda": {"hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024},
    "cpu": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96},
    "quick": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48},
}
_TOKENS = {"cuda": 192, "cpu": 48, "quick": 24}
_NEW_TOKENS = 8
_CLOSE = 5e-2  # of the norm: gradients and logits of two ways through a model in bfloat16


class Model(NamedTuple):
    """A model: how it is made, which mask it has, and whether it is attention that can be replaced."""

    make: Callable[[dict[str, int]], nn.Module]
    mask: masks.Mask
    is_attention: bool


def _llama_like(name: str, **more: Any) -> Callable[[dict[str, int]], nn.Module]:
    def make(sizes: dict[str, int]) -> nn.Module:
        import transformers  # noqa: PLC0415  takes seconds

        config = getattr(transformers, f"{name}Config")(
            **sizes,
            vocab_size=_WORDS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=sizes["hidden_size"] // 4,
            **more,
        )
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _mamba2(sizes: dict[str, int]) -> nn.Module:
    import transformers  # noqa: PLC0415  takes seconds

    width = sizes["hidden_size"]
    config = transformers.Mamba2Config(
        vocab_size=_WORDS, hidden_size=width, num_hidden_layers=sizes["num_hidden_layers"], num_heads=8,
        head_dim=2 * width // 8, state_size=16, n_groups=2, chunk_size=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


MODELS = {
    "Qwen3": Model(_llama_like("Qwen3"), masks.Causal(), True),
    "Mistral": Model(_llama_like("Mistral", sliding_window=_WINDOW), masks.sliding_window(_WINDOW), True),
    "Mamba-2": Model(_mamba2, masks.Causal(), False),
}


def measure(context: Context) -> Iterator[Finding]:
    """Yield the four checks of each model."""
    for name, its in MODELS.items():
        torch.manual_seed(0)
        sizes, count = _SIZES[context.level], _TOKENS[context.level]
        model = its.make(sizes).to(context.device.name, torch.bfloat16).eval()
        tokens = torch.randint(3, _WORDS, (2, count), generator=torch.Generator().manual_seed(0)).to(
            context.device.name
        )
        checks = {"audit": _audit, "record": _record, "training step": _training_step, "generate": _generate}
        for check, judge in checks.items():
            if context.left() < 0.0:
                return
            try:
                text, ok = judge(copy.deepcopy(model), tokens, its)
            except Exception as error:  # whatever a model raises is a finding; the next check has a copy of its own
                text, ok = f"raised {type(error).__name__}: {' '.join(str(error).split())[:250]}", False
            yield Finding(f"{name}: {check}", text, ok, headline=True)
        context.device.synchronize()


def _audit(model: nn.Module, tokens: Tensor, its: Model) -> tuple[str, bool]:
    """Judge who reaches whom in the model."""
    report = sc.audit(model, its.mask, inputs=tokens[:, :48], tests=4)
    told = ", ".join(f"{claim.name} {claim.verdict}" for claim in report.claims)
    return f"{told}; rule {report.rule}", report.ok


def _record(model: nn.Module, tokens: Tensor, its: Model) -> tuple[str, bool]:
    """Judge whether a recorded model gives the same bits, and every layer was recorded."""
    with torch.no_grad():
        expected = model(tokens).logits
        with sc.record(model) as recording:
            logits = model(tokens).logits
    same = torch.equal(expected, logits)
    layers = len(recording.layers)
    text = f"{'the same bits' if same else 'other bits'}, {layers} of {model.config.num_hidden_layers} layers recorded"
    return text, same and layers == model.config.num_hidden_layers


def _training_step(model: nn.Module, tokens: Tensor, its: Model) -> tuple[str, bool]:
    """Judge gradients after `replace_attention` by those of the model as it was; a recurrence must be refused."""
    stock = copy.deepcopy(model)
    if its.is_attention:
        stock.set_attn_implementation("eager")
        sc.replace_attention(model)
        told = f"{model.config._attn_implementation} beside eager"
    else:
        try:
            sc.replace_attention(model)
        except sc.UnsupportedError as refusal:
            told = f"replace_attention refuses it: {'; '.join(refusal.reasons)[:80]}"
        else:
            return "replace_attention took a model without attention", False
    losses = [_step(each, tokens) for each in (model, stock)]
    error = _of_gradients(model, stock)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
        after = float(_loss(model, tokens))
    text = f"{told}: gradients differ by {error:.1g} of their norm; loss {losses[0]:.3f}, then {after:.3f}"
    return text, error <= _CLOSE and after < losses[0]


def _of_gradients(model: nn.Module, stock: nn.Module) -> float:
    """Return how far all gradients together are from those of the other model."""
    pairs = [(a.grad.double(), b.grad.double()) for a, b in zip(model.parameters(), stock.parameters(), strict=True)]
    missed, size = (
        sum(float(x.square().sum()) for x in part) for part in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    return float((missed / size) ** 0.5)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, labels=tokens).loss


def _step(model: nn.Module, tokens: Tensor) -> float:
    loss = _loss(model, tokens)
    loss.backward()
    return float(loss)


def _difference(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-6))


def _generate(model: nn.Module, tokens: Tensor, its: Model) -> tuple[str, bool]:
    """Judge text from a static cache by the model as it was, with its usual cache."""
    model.generation_config.eos_token_id = None  # all tokens that are asked for
    stock, options = copy.deepcopy(model), {}
    if its.is_attention:
        stock.set_attn_implementation("eager")
        sc.replace_attention(model)
        options = {"cache_implementation": "static", "disable_compile": True}
    ours, theirs = (
        each.generate(
            tokens,
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **own,
        )
        for each, own in ((model, options), (stock, {}))
    )
    same = ours.sequences == theirs.sequences
    # If two tokens are nearly as likely, bfloat16 may choose the other: up to there logits must agree.
    agreeing = int(same.all(0).long().cumprod(0).sum()) - tokens.shape[1]
    steps = min(agreeing + 1, _NEW_TOKENS)
    errors = [_difference(a, b) for a, b in zip(ours.logits[:steps], theirs.logits[:steps], strict=True)]
    text = f"{agreeing} of {_NEW_TOKENS} tokens the same; logits until then differ by up to {max(errors):.1g}"
    return text, max(errors) <= _CLOSE
