"""Models whose indexer selects keys, or blocks of keys, equal their eager attention."""

import pytest
import torch
import transformers
from tests.integrations import model_zoo as zoo
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTextModel

from saccade.integrations.transformers import install


@pytest.fixture(autouse=True)
def installed():
    install()


def close(ours, theirs, tolerance=2e-5):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("padded", [0, 3])
def test_keys_that_an_indexer_selects(name, padded):
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 40, "moe_intermediate_size": 16, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "index_topk": 4, "index_n_heads": 2,
        "index_head_dim": 16, "max_position_embeddings": 64, "vocab_size": zoo.WORDS, "pad_token_id": 0,
    }  # fmt: skip
    network = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    outputs, inputs = [], zoo.batch("llama", padded=padded)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(7))
        for implementation in ("eager", "saccade"):
            network.set_attn_implementation(implementation)
            whole = network(**inputs)
            outputs.append(zoo.output("llama", whole, padded))
            more = {"attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.int64)], 1)}
            step = network(inputs["input_ids"][:, :1], past_key_values=whole.past_key_values, **more)
            outputs.append(step.last_hidden_state)
    close(outputs[2], outputs[0])
    close(outputs[3], outputs[1])


@pytest.mark.parametrize("index_heads", [1, 2])
def test_blocks_that_an_indexer_selects(index_heads):
    # Without padding: this model's indexer scores padding too, so that eager and sdpa differ there.
    config = MiniMaxM3VLTextConfig(
        vocab_size=zoo.WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, index_n_heads=index_heads,
        index_head_dim=16, index_block_size=4, index_topk_blocks=2, bos_token_id=None, eos_token_id=None,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    )  # fmt: skip
    network, outputs = MiniMaxM3VLTextModel(config).eval(), []
    tokens = torch.arange(2 * 23).view(2, 23) * 7 % zoo.WORDS
    with torch.no_grad():
        for implementation in ("eager", "saccade"):
            network.set_attn_implementation(implementation)
            outputs.append(network(tokens).last_hidden_state)
            past = network(tokens[:, :17], use_cache=True).past_key_values
            outputs.append(network(tokens[:, 17:], past_key_values=past).last_hidden_state)
    close(outputs[2], outputs[0])
    close(outputs[3], outputs[1])
    close(outputs[1], outputs[0][:, 17:])
