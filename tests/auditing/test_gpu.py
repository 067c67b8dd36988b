"""On a CUDA device an audit says what it says on the processor; compiled with graphs of CUDA too."""

import pytest
import torch
import transformers

from saccade import audit, masks

SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(3, 101, (2, 24), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=48)).eval()


def compiled(model):
    return torch.compile(model, mode="reduce-overhead")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how", [torch.nn.Module.cuda, lambda model: compiled(model.cuda())], ids=["as it is", "compiled"]
)
@pytest.mark.parametrize("rule", [masks.Causal(), masks.Causal() & masks.Window(2, 0)], ids=str)
def test_a_device_changes_nothing(how, rule):
    expected = audit(llama(), rule, inputs=TOKENS)
    report = audit(how(llama()), rule, inputs=TOKENS.cuda())
    assert [(claim.name, claim.verdict) for claim in report.claims] == [
        (claim.name, claim.verdict) for claim in expected.claims
    ]
    assert [found.pair for found in report.findings] == [found.pair for found in expected.findings]
    assert [found.module for found in report.findings] == [found.module for found in expected.findings]
