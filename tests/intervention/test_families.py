"""intervene on four families of transformers equals hooks on their projections, written with their own weights."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from tests.integrations import model_zoo
from torch import Tensor, nn

import saccade as sc
from saccade import masks

H, N = 4, 9
HEADS = [0, 2]
CUT = masks.Window(2, 1)


class Family(NamedTuple):
    """The parts of a family of models.

    Attributes:
        layer: name of the attention layer ``{i}``.
        value: name of the module that projects values, which are its last outputs.
        projection: name of the module that projects the joined outputs of the heads.
        kv_heads: number of heads of the values.
    """

    layer: str
    value: str
    projection: str
    kv_heads: int = H


FAMILIES = {
    "gpt2": Family("transformer.h.{i}.attn", "transformer.h.{i}.attn.c_attn", "transformer.h.{i}.attn.c_proj"),
    "llama": Family("model.layers.{i}.self_attn", *(f"model.layers.{{i}}.self_attn.{x}_proj" for x in "vo"), 2),
    "bert": Family(
        "encoder.layer.{i}.attention.self",
        "encoder.layer.{i}.attention.self.value",
        "encoder.layer.{i}.attention.output.dense",
    ),
    "t5": Family("block.{i}.layer.0.SelfAttention", *(f"block.{{i}}.layer.0.SelfAttention.{x}" for x in "vo")),
}


def _model(name: str, implementation: str) -> Any:
    model = model_zoo.model(name).double()
    if implementation == "saccade":
        sc.integrations.transformers.install()
    model.set_attn_implementation(implementation)
    return model.encoder if name == "t5" else model


def _ids(seed: int) -> Tensor:
    return torch.randint(3, model_zoo.WORDS, (3, N), generator=torch.Generator().manual_seed(seed))


def _output(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(ids)[0]
    return out


class Seen(NamedTuple):
    """Outputs of the heads ``[batch, heads, len, dim]``, values and weights of a layer, as its hooks have them."""

    out: Tensor
    value: Tensor
    own: Tensor
    other: Tensor


def _replaced(out: Tensor, new: Tensor) -> Tensor:
    changed = out.clone()
    changed[:, HEADS] = new[:, HEADS]
    return changed


def _cut(seen: Seen) -> Tensor:
    weights = seen.own * CUT.to_dense(N)[0, 0]
    return _replaced(seen.out, weights / weights.sum(-1, keepdim=True) @ seen.value)


# For each edit: with saccade, written by hand, and whether it changes all layers or the second.
EDITS: dict[str, tuple[Callable[[sc.intervene, str, Any], None], Callable[[Seen], Tensor], bool]] = {
    "zero": (
        lambda edit, layer, other: edit.ablate(layer, HEADS, "zero"),
        lambda seen: _replaced(seen.out, torch.zeros_like(seen.out)),
        False,
    ),
    "scale 0": (
        lambda edit, layer, other: edit.scale(layer, HEADS, 0.0),
        lambda seen: _replaced(seen.out, 0.0 * seen.out),
        False,
    ),
    "scale": (
        lambda edit, layer, other: edit.scale(layer, HEADS, 0.5),
        lambda seen: _replaced(seen.out, 0.5 * seen.out),
        False,
    ),
    "mean": (
        lambda edit, layer, other: edit.ablate(layer, HEADS, "mean"),
        lambda seen: _replaced(seen.out, seen.out.mean(0, keepdim=True).expand_as(seen.out)),
        False,
    ),
    "resample": (
        lambda edit, layer, other: edit.ablate(layer, HEADS, "resample"),
        lambda seen: _replaced(seen.out, seen.out.roll(1, 0)),
        False,
    ),
    "pattern": (
        lambda edit, layer, other: edit.pattern(layer, HEADS, other),
        lambda seen: _replaced(seen.out, seen.other @ seen.value),
        False,
    ),
    "mask": (lambda edit, layer, other: edit.mask(layer, HEADS, CUT), _cut, False),
    "freeze": (lambda edit, layer, other: edit.freeze(other), lambda seen: seen.other @ seen.value, True),
}


def _by_hand(name: str, change: Callable[[Seen], Tensor], is_everywhere: bool) -> Tensor:
    """Return the output of a model whose projections have hooks that change the outputs of its heads."""
    family, model = FAMILIES[name], _model(name, "eager")
    own, other = (model(_ids(seed), output_attentions=True).attentions for seed in (0, 1))
    with ExitStack() as stack:
        for i in range(2) if is_everywhere else [1]:
            values: list[Tensor] = []

            def keep(module: nn.Module, args: Any, out: Tensor, values: list[Tensor] = values) -> None:
                width = out.shape[-1] // (3 if name == "gpt2" else 1)
                heads = out[..., -width:].unflatten(-1, (family.kv_heads, -1)).transpose(1, 2)
                values[:] = [heads.repeat_interleave(H // family.kv_heads, 1)]

            def hook(module: nn.Module, args: Any, i: int = i, values: list[Tensor] = values) -> Tensor:
                out = args[0].unflatten(-1, (H, -1)).transpose(1, 2)
                seen = Seen(out, values[0], own[i].to(out.dtype), other[i].to(out.dtype))
                return change(seen).transpose(1, 2).flatten(2)

            get = model.get_submodule
            for handle in (
                get(family.value.format(i=i)).register_forward_hook(keep),
                get(family.projection.format(i=i)).register_forward_pre_hook(hook),
            ):
                stack.callback(handle.remove)
        return _output(model, _ids(0))


@pytest.mark.ci
@pytest.mark.parametrize(
    "implementation", ["sdpa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "saccade"))]
)
@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_edits_equal_hooks_written_by_hand(
    name: str, kind: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eager attention rounds weights to float32, which costs the last of six digits.
    monkeypatch.setattr(nn.functional, "softmax", lambda x, dim=-1, **_: x.softmax(dim))
    with_saccade, by_hand, is_everywhere = EDITS[kind]
    model, layer = _model(name, implementation), FAMILIES[name].layer.format(i=1)
    with torch.no_grad():
        expected, plain = _by_hand(name, by_hand, is_everywhere), _output(model, _ids(0))
        with sc.record(model, keep="qk") as other:
            model(_ids(1))
        with sc.intervene(model) as edit:
            with_saccade(edit, layer, other if is_everywhere else other[layer].matrix)
            got = _output(model, _ids(0))
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(got, plain, atol=1e-4)
        torch.testing.assert_close(_output(model, _ids(0)), plain)
