"""The indexers of transformers choose the same keys, and attend alike where they do."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from saccade import masks, mechanisms
from saccade.scorers import LightningIndexer


@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_the_indexers_of_transformers(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    made = import_module(f"transformers.models.{model}.modeling_{model}")
    name = {"deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa"}[model]
    config = getattr(import_module(f"transformers.models.{model}.configuration_{model}"), f"{name}Config")(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_n_heads=4,
        index_head_dim=8,
        index_topk=9,
        num_hidden_layers=1,
        attn_implementation="eager",
    )
    layer, n = getattr(made, f"{name}Attention")(config, 0).eval(), 40
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.dim() > 1 else None
    hidden, causal = torch.randn(2, n, 32), torch.ones(n, n, dtype=torch.bool).tril()
    hides = torch.zeros(n, n).masked_fill(~causal, torch.finfo(torch.float32).min).expand(2, 1, n, n)
    positions = torch.arange(n)[None].expand(2, -1)
    cos_sin = getattr(made, f"{name}RotaryEmbedding")(config)(hidden, positions)
    seen: dict[str, Tensor] = {}

    def heard(module: object, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **rest: float) -> object:
        seen.update(query=query, key=key, value=value, mask=mask, out=eager(module, query, key, value, mask, **rest)[0])
        return seen["out"], None

    eager = made.eager_attention_forward
    monkeypatch.setattr(made, "eager_attention_forward", heard)
    own: dict[str, Tensor] = {}
    real = torch.matmul

    def product(left: Tensor, right: Tensor) -> Tensor:
        own.setdefault("q", left) if left.dim() == 4 and right.dim() == 4 and right.shape[1] == 1 else None
        own.setdefault("k", right) if "q" in own else None
        return real(left, right)

    with torch.no_grad():
        monkeypatch.setattr(torch, "matmul", product)
        layer(hidden, cos_sin, hides, position_ids=positions)
        monkeypatch.setattr(torch, "matmul", real)
        weights = layer.indexer.weights_proj(hidden).mT
    index = LightningIndexer(own["q"].transpose(1, 2), own["k"].mT, weights)
    scale = layer.scaling
    top = mechanisms.TopK(index, 9, softmax=mechanisms.Softmax(scale=scale))
    matrix = top(seen["query"], seen["key"], mask=masks.Causal())
    theirs = (seen["mask"][:, 0] == 0) & causal
    alike = ((matrix.to_dense()[:, 0] > 0) == theirs).all(-1)
    ranked = index.scores(range(n), n)[:, 0].detach().masked_fill(~causal, -torch.inf).sort(-1, descending=True).values
    assert alike.float().mean() > 0.5
    torch.testing.assert_close(ranked[~alike][:, 8], ranked[~alike][:, 9])  # a tie, which topk breaks as it likes
    out = (matrix @ seen["value"]).transpose(1, 2)
    torch.testing.assert_close(out[alike], seen["out"].reshape(out.shape)[alike], atol=2e-6, rtol=2e-5)
