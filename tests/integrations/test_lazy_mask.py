"""A mask that stands for a rule becomes a tensor when it is written to, and holds what was written."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from torch import Tensor
from transformers import AttentionInterface

import saccade as sc
from saccade import caches, masks
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import as_rule
from saccade.integrations.transformers import install
from saccade.integrations.transformers_caches import install_caches, transformers_cache

OTHER = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool).expand(1, 1, 4, 5).contiguous()
SELECTED = torch.tensor([0, 2])
# Arguments for in-place methods and functions with out=; each takes some of them.
ARGUMENTS = [
    (),
    (OTHER,),
    (OTHER, OTHER),
    (True,),
    (0,),
    (OTHER, False),
    (0, SELECTED, True),
    (0, SELECTED, OTHER),
    ((torch.tensor([0]),), torch.tensor(True)),
    (SELECTED, torch.tensor([True, True])),
    (OTHER.long(), torch.tensor(True)),
    (-1, OTHER.long(), OTHER),
    (-1, OTHER.long(), True),
    (2, 3),
]
IN_PLACE = sorted(name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_"))
OPERATORS = sorted(name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
DOCUMENTED = {name: str(getattr(torch, name).__doc__) for name in dir(torch)}
WITH_OUT = sorted(name for name, text in DOCUMENTED.items() if "*, out" in text or ", out=None" in text)


def mask_of(rule=masks.Causal(), q=range(1, 5), kv=range(5)):  # noqa: B008  masks are values
    return LazyMask(Placed(rule, q, kv), 1, torch.device("cpu"))


def said(mask):
    """Return the pairs that a mask allows, read at the positions of its queries and keys."""
    rule, q, kv = mask.placed[:3]
    b, h = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
    return rule.allows(b, h, torch.tensor(q)[:, None], torch.tensor(kv)).expand(1, 1, len(q), len(kv))


def method(name):
    return lambda x, *given: getattr(x, name)(*given)


def into(function):
    return lambda x, *given: function(*given, out=x)


def tried(function, tensor, arguments):
    """Return whether a call succeeded or raised UnsupportedError. Most fail: few functions take these arguments."""
    torch.manual_seed(0)
    try:
        function(tensor, *arguments)
    except (RuntimeError, TypeError, IndexError, NotImplementedError, ValueError) as error:
        return isinstance(error, sc.UnsupportedError)
    return True


@pytest.mark.filterwarnings("ignore")  # torch's, about functions that it will drop
# Hundreds of functions, seconds: the ones that write most often, below, are tried under both guards in every run.
@pytest.mark.slow
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_every_way_to_write_into_a_tensor(guard):
    ways = {name: method(name) for name in (*IN_PLACE, *OPERATORS)}
    ways |= {f"{name}(out=)": into(getattr(torch, name)) for name in WITH_OUT}
    followed, refused = set(), set()
    for name, function in ways.items():
        for arguments in ARGUMENTS:
            plain = mask_of().written_out()
            before = plain.clone()
            if not tried(function, plain, arguments):
                continue
            with guard():
                lazy = mask_of()
                torch.manual_seed(0)
                try:
                    function(lazy, *arguments)
                except sc.UnsupportedError:
                    refused.add(name)
                    continue
                assert plain.shape == before.shape, name  # else it would be of another form now
                assert torch.equal(said(lazy), plain), name
                assert torch.equal(lazy.clone(), plain), name
                if not torch.equal(plain, before):
                    followed.add(name)
    assert {"masked_fill_", "index_put_", "copy_", "fill_", "__iand__", "__ior__", "logical_not(out=)"} <= followed
    assert {"unsqueeze_", "squeeze_", "transpose_", "resize_", "t_"} & refused
    assert len(followed) > 60


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__((..., 0), False),
        lambda x: x.__setitem__(OTHER, False),
        lambda x: x[..., 1:3].fill_(False),
        lambda x: x.view(-1)[::2].logical_not_(),
        lambda x: x.diagonal(0, 2, 3).zero_(),
        lambda x: x.expand(1, 1, 4, 5).unbind(2)[1].fill_(True),
        lambda x: x.detach().masked_fill_(OTHER, False),
        lambda x: x.data.fill_(False),
        lambda x: torch._foreach_zero_([x]),
    ],
)
def test_parts_and_copies_that_share_its_memory(write, guard):
    with guard():
        plain, lazy = mask_of().written_out(), mask_of()
        part = lazy[..., 1]
        write(plain)
        write(lazy)
        assert torch.equal(said(lazy), plain)
        assert torch.equal(part, plain[..., 1])
        assert "Dense" in str(lazy.placed.rule)


def test_reading_keeps_the_rule():
    lazy = mask_of()
    assert lazy[..., 2:].sum() == (~lazy).sum() == 6
    assert (lazy & lazy.clone()).any()
    assert lazy.placed.rule == masks.Causal()


GROUP = torch.tensor([[0, 1, 1, 0, 2], [0, 0, 1, 1, 1]])


def same_group(b, h, q, kv):
    """Return whether two positions are in one group, as a user's function of single pairs does by a table."""
    return (GROUP[b, q] == GROUP[b, kv]) & (GROUP[b, q] > 0)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[:, :, -1:, :],
        lambda x: x.clone(),
        lambda x: ~x,
        lambda x: x.float() * -1,
        lambda x: torch.cat([x, x], 3),
        lambda x: x.masked_fill_(x, False),
        lambda x: torch.where(x, torch.zeros(()), -torch.inf),
        lambda x: x & torch.ones_like(x),
    ],
)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_operations_on_a_users_function(use, guard, one_by_one):
    b, h, q, kv = torch.meshgrid(*(torch.arange(size) for size in (2, 1, 5, 5)), indexing="ij")
    dense = same_group(b, h, q, kv)
    lazy = LazyMask(Placed(as_rule(same_group, one_by_one=one_by_one), range(5), range(5)), 2, torch.device("cpu"))
    with guard():
        assert torch.equal(use(lazy), use(dense))


@pytest.mark.parametrize("q, kv", [(range(1, 5), range(5)), (range(6, 9), range(16)), (range(9, 12), range(4, 10))])
def test_written_entries_follow_the_tokens(q, kv):
    lazy = mask_of(masks.Window(3, 3), q, kv)
    expected = lazy.clone().logical_not()
    lazy.logical_not_()
    assert torch.equal(said(lazy), expected)
    later = lazy.placed
    lazy.fill_(True)
    assert torch.equal(said(mask_of(later.rule, q, kv)), expected)  # what was read before stays as it was


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.share_memory_(),
        lambda x: x.resize_(2, 2),
        lambda x: setattr(x, "data", OTHER),
    ],
)
def test_other_forms_and_other_memory_are_refused(change):
    with pytest.raises(
        sc.UnsupportedError, match=r"LazyMask: .* cannot run(.|\n)*cannot change its shape(.|\n)*mask.clone\(\)"
    ):
        change(mask_of())
    with pytest.raises(sc.UnsupportedError, match="with a different shape"), pytest.warns(UserWarning, match="resized"):
        torch.logical_not(OTHER[0], out=mask_of())


@pytest.mark.parametrize("name, cache", [("llama", False), ("llama", True), ("mistral", False)])
def test_a_model_that_writes_into_its_mask(name, cache, monkeypatch):
    install()
    install_caches()
    function = AttentionInterface._global_mapping
    original = {key: function[key] for key in ("sdpa", "saccade", "saccade-cache")}

    def written_into(key):
        def attention(module, query, key_states, value, attention_mask, **facts):
            if attention_mask is not None and attention_mask.shape[-1] > 4:
                attention_mask[..., 1:3] = False
                attention_mask[..., -1] &= attention_mask[..., 0]
            return original[key](module, query, key_states, value, attention_mask, **facts)

        return attention

    for key in original:
        monkeypatch.setitem(function, key, written_into(key))
    outputs, inputs = [], zoo.batch(name)
    for implementation in original:
        network, own = zoo.model(name, implementation), None
        if implementation == "saccade-cache":
            own = transformers_cache(caches.Cache(caches.KVCache() for _ in range(2)))
        with torch.no_grad():
            if cache:
                text = network.generate(
                    **inputs, past_key_values=own, max_new_tokens=5, do_sample=False, disable_compile=True
                )
                outputs.append(text.float())
            else:
                outputs.append(zoo.output(name, network(**inputs, past_key_values=own)))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=2e-5, rtol=2e-5)
