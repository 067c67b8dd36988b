"""Read and write checkpoint folders: configuration, weights and tokenizer. Nothing is ever unpickled."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.support.errors import missing_extra, value_error
from saccade.support.validation import is_finite_number, is_integer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def _is_list(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(type(element) is kind for element in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "be an int below 2**31": (
        lambda value: is_integer(value) and abs(value) < 1 << 31,  # so that products of two sizes fit into 64 bits
        "vocab_size max_position_embeddings hidden_size num_attention_heads num_hidden_layers intermediate_size "
        "type_vocab_size pad_token_id num_key_value_heads head_dim sliding_window sliding_window_pattern "
        "max_window_layers "
        "n_positions n_embd n_head n_layer n_inner original_max_position_embeddings "
        "num_channels projection_dim d_model num_queries encoder_layers decoder_layers encoder_ffn_dim decoder_ffn_dim "
        "encoder_attention_heads decoder_attention_heads "
        "intermediate_size_mlp num_local_experts num_experts_per_tok attention_chunk_size floor_scale "
        "interleave_moe_layer_step no_rope_layer_interval "
        "max_len embed_dim num_heads num_kv_heads num_layers feed_forward_dim short_convolution window segment "
        "num_experts num_chosen_experts expert_dim",
    ),
    "be a number": (
        is_finite_number,
        "layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob rms_norm_eps attention_dropout "
        "layer_norm_epsilon resid_pdrop embd_pdrop attn_pdrop norm_eps dropout_p attention_dropout_p "
        "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim "
        "partial_rotary_factor dropout activation_dropout query_pre_attn_scalar attn_logit_softcapping "
        "final_logit_softcapping logit_scale logit_softcap rope_local_base_freq softcap attention_scale "
        "embedding_scale eps attn_scale",
    ),
    "be true or false": (
        lambda value: isinstance(value, bool),
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window is_decoder add_cross_attention "
        "scale_attn_weights scale_attn_by_inverse_layer_idx gated feed_forward_bias tied truncate "
        "qkv_bias auxiliary_loss use_bidirectional_attention norm_first part_norm parallel learned after_rotary rotary "
        "use_qk_norm uses_qk_norm uses_experts",
    ),
    "be a name": (
        lambda value: isinstance(value, str),
        "model_type hidden_act activation_function position_embedding_type position_encoding activation norm "
        "rope_type type rotary_layout across",
    ),
    "be an int or a list of ints": (
        lambda value: is_integer(value) or _is_list(int)(value),
        "eos_token_id image_size patch_size",
    ),
    "be a list of ints": (_is_list(int), "end_tokens moe_layers no_rope_layers"),
    "be a list of names": (_is_list(str), "layer_types"),
}
_OBJECTS = (
    "sliding_attention",
    "full_attention",
    "qk_norm",
    "layers",
    "text_config",
)  # and all keys that begin with "rope_"
_CHECKS = {key: (fits, rule) for rule, (fits, keys) in _RULES.items() for key in keys.split()}


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` from a checkpoint folder.

    Raises:
        ValueError: the file is missing or does not contain a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise value_error("path", "be a folder with config.json", repr(str(folder)))
    return _read_object(path)


def check_types(config: Mapping[str, Any], name: str = "config.json") -> None:
    """Raise an error unless every value that we read from config.json has the right type or is null (missing).

    The file may come from an unknown source, so no value in it is trusted.

    Args:
        config: the contents of config.json, of any model family.
        name: the file's name in the error message.

    Raises:
        ValueError: a value has the wrong type; the message names its key.
    """
    for key, value in config.items():
        fits, rule = _CHECKS.get(key, (None, ""))
        if fits is not None and value is not None and not fits(value):
            raise value_error(f"{key} in {name}", rule, repr(value))
        inner = value if isinstance(value, list) else [value]
        for each in inner if key in _OBJECTS or key.startswith("rope_") else ():
            if isinstance(each, Mapping):
                check_types(each, f"{key} of {name}")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in a checkpoint folder by name, from one safetensors file or from several with an index.

    Files are memory-mapped: data is read only when it is used, so inspecting shapes costs nothing.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the file is missing or is not a safetensors file.
    """
    try:
        from safetensors import SafetensorError  # noqa: PLC0415  imported when used
        from safetensors.torch import load_file  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "models") from None
    weights: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            weights |= load_file(path)
        except (SafetensorError, RuntimeError, TypeError) as error:  # TypeError for shapes too large for torch
            got = str(error).partition("\n")[0]
            raise value_error(path.name, "be in safetensors format", got) from None
    return weights


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: "Tokenizer | None",
) -> None:
    """Write a checkpoint folder: ``model.safetensors``, ``tokenizer.json`` if there is one, and ``config.json``.

    Each file is written under a temporary name. They are renamed once all of them are complete.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the folder cannot be written.
    """
    try:
        from safetensors.torch import save_file  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "models") from None

    # transformers requires the metadata {"format": "pt"}.
    writers: dict[str, Callable[[Path], object]] = {
        _WEIGHTS: lambda path: save_file(dict(weights), path, metadata={"format": "pt"})
    }
    if tokenizer is not None:
        writers["tokenizer.json"] = lambda path: tokenizer.save(str(path))
    writers["config.json"] = lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = {name: folder / f".{name}.{os.getpid()}.part" for name in writers}
    try:
        for name, write in writers.items():
            write(temporary[name])
        for name in writers:
            # safetensors creates files that only their owner can read; give all files the mode of config.json.
            shutil.copymode(temporary["config.json"], temporary[name])
        for name in writers:
            os.replace(temporary[name], folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def read_tokenizer(folder: Path) -> "Tokenizer | None":
    """Read the tokenizer from ``tokenizer.json`` in a checkpoint folder. If the file does not exist, return None.

    Truncation and padding are always turned off, even if the file turns them on, so that every token of a text is kept
    and none is added.

    Raises:
        ImportError: the file exists, but tokenizers is not installed.
        ValueError: the file exists, but does not describe a tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra("tokenizers", "models") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower type
        raise value_error(path.name, "be a tokenizer file that the package tokenizers can read", f"{error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _weight_files(folder: Path) -> list[Path]:
    """Return the paths of the safetensors files in a checkpoint folder."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        others = sorted(file.name for file in folder.iterdir() if file.suffix in {".bin", ".safetensors", ".pt"})
        got = f"only {', '.join(others)}" if others else "no weights"
        hint = (
            f"or in several files and a {_INDEX}; pickled weights (.bin, .pt) can run code when they are read, so they "
            "are not read here; transformers' save_pretrained(folder) writes safetensors."
        )
        raise value_error("path", f"have its weights in one {_WEIGHTS}", got, hint=hint)
    listed = _read_object(folder / _INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise value_error(_INDEX, "have a weight_map of names to files", f"a {type(listed).__name__}")
    names = sorted(set(map(str, listed.values())))
    for name in names:
        # Read only files in this folder, because the index is not trusted.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise value_error(_INDEX, "name only safetensors files in its own folder", repr(name))
        if not (folder / name).is_file():
            raise value_error("path", f"contain the file {name} that its index names", "none")
    return [folder / name for name in names]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise value_error(path.name, "be JSON", f"{error}") from None
    if not isinstance(contents, dict):
        raise value_error(path.name, "be a JSON object", f"a {type(contents).__name__}")
    return contents
