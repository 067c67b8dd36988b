"""Models of every architecture of transformers that can be built small, with inputs for them."""

import contextlib
import importlib
import inspect
import warnings

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils import logging

WORDS, LENGTH = 60, 14
LARGEST = 6_000_000  # parameters

_SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "width", "n_embed"), 32),
    **dict.fromkeys(("hidden_dim", "text_hidden_size", "encoder_hidden_size", "decoder_hidden_size", "emb_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size", "projection_dim", "output_proj_dims"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "encoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_encoder_layers", "num_decoder_layers", "num_hidden_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 40),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size", "d_inner", "mlp_dim", "shared_intermediate_size"), 40),
    **dict.fromkeys(("encoder_intermediate_size", "decoder_intermediate_size", "dense_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp"), 40),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input", "entity_vocab_size"), WORDS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "num_selected_experts", "moe_k"), 1),
    **dict.fromkeys(("image_size", "input_size"), 32),
    **dict.fromkeys(("patch_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "n_ctx"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention"), 5),
    "max_source_positions": 32,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
}  # fmt: skip


def architectures():
    """Names of all architectures that have a base model."""
    return sorted(MODEL_MAPPING_NAMES)


def build(name):
    """Return a small model of an architecture with "eager" attention, or None if it cannot be built small."""
    names = MODEL_MAPPING_NAMES[name]
    with _quiet():
        try:
            config = _small(CONFIG_MAPPING[name]())
            module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
            kind = getattr(module, names if isinstance(names, str) else names[0])
            if not issubclass(kind, PreTrainedModel):
                return None
            config._attn_implementation = "eager"
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind(config).parameters())
            if size > LARGEST:
                return None
            torch.manual_seed(0)
            model = kind(config).eval()
        # A configuration of these sizes need not be one: whatever it fails with, there is no model to look at.
        except Exception:
            return None
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.is_floating_point():
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


def batches(model):
    """Yield the inputs that a model may take, most telling first."""
    generator = torch.Generator().manual_seed(3)
    takes = inspect.signature(model.forward).parameters
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=generator)
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0, 12:] = 0  # right padding, shorter than the sliding window: every token attends to something
    pair = {"decoder_input_ids": ids[:, :7]} if "decoder_input_ids" in takes else {}
    boxes = {"bbox": torch.zeros(2, LENGTH, 4, dtype=torch.int64)} if "bbox" in takes else {}
    if "input_ids" in takes:
        yield {"input_ids": ids, "attention_mask": padding, **pair, **boxes}
        yield {"input_ids": ids, **pair, **boxes}
    for width in (32, 64, 128):
        embeds = torch.randn(2, LENGTH, width, generator=generator)
        name = next((name for name in ("inputs_embeds", "hidden_states") if name in takes), None)
        if name:
            yield {name: embeds, "attention_mask": padding}
            yield {name: embeds}
    if "pixel_values" in takes:
        for shape in ((2, 3, 32, 32), (2, 1, 32, 32), (2, 2, 3, 32, 32)):
            image = torch.randn(shape, generator=generator)
            yield {"pixel_values": image}
            if "input_ids" in takes:
                yield {"pixel_values": image, "input_ids": ids, "attention_mask": padding}
    if "input_values" in takes:
        yield {"input_values": torch.randn(2, 2000, generator=generator)}
        yield {"input_values": torch.randn(2, 40, 128, generator=generator)}
    if "input_features" in takes:
        for bins in (80, 128):
            yield {"input_features": torch.randn(2, bins, 64, generator=generator), **pair}
            yield {"input_features": torch.randn(2, 64, bins, generator=generator), **pair}
    if "past_values" in takes:
        yield {"past_values": torch.randn(2, 64, 1, generator=generator)}


def run(model, batch):
    """Return the floating-point tensors of a model's output, in order."""
    torch.manual_seed(1)
    with torch.no_grad(), _quiet():
        out = model(**batch)
    values = out.to_tuple() if hasattr(out, "to_tuple") else out
    return [x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()]


def accepted(model):
    """Return the first inputs that a model runs on, and its outputs, or None."""
    for batch in batches(model):
        # Inputs that a model does not take fail in a way of its own.
        with contextlib.suppress(Exception):
            if out := run(model, batch):
                return batch, out
    return None


def _small(config):
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        own = name.removeprefix("_") if name.startswith("_") else name
        if isinstance(value, PreTrainedConfig):
            _small(value)
        elif own == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))[:2]
            setattr(config, name, (kinds * 2)[:2])
        elif isinstance(value, list) and len(value) == layers and layers > 2:
            setattr(config, name, value[:2])
        elif own in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            with contextlib.suppress(Exception):
                setattr(config, name, _SIZES[own])
    return config


@contextlib.contextmanager
def _quiet():
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
