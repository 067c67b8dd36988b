"""PrefixStore: a folder with the keys and values of common prefixes, shared by prompts and processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from saccade.caches.cache import LayerCache
from saccade.caches.files.block_store import BlockFolder
from saccade.caches.files.tensor_files import VERSION, checked_path, decoded, encoded
from saccade.caches.kv_cache import KVCache
from saccade.caches.model_cache import Cache
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_int, check_type

_KIND = "block of a prefix"


class PrefixStore:
    """A folder that stores keys and values in blocks, for prompts that share a prefix with earlier prompts.

    A sequence is divided into blocks of ``block_size`` tokens. Each block has a file, named by a hash of its tokens,
    all blocks before it and everything else that keys and values depend on: the model's `fingerprint`, the ``salt``
    and the format. So a block is found only if the full sequence up to its end is the same, and never for a different
    model. A checksum verifies the contents, and the stored tokens are compared with those of the sequence. A damaged
    file counts as missing and is removed. A file without read permission also counts as missing.

    Any number of processes may use a folder, and any of them may be killed at any time, because readers only see
    complete files. To stay within ``max_bytes``, the store removes the least recently used blocks, and later blocks of
    a sequence before earlier ones. It reads, counts and removes only files that it could have written itself. Links
    are never followed, so nothing outside of the folder changes.

    Args:
        folder: created if it does not exist. Only the store should write there.
        max_bytes: largest total size of the files.
        fingerprint: fingerprint of the model; see `fingerprint`.
        block_size: number of tokens in a block.
        salt: describes everything else that changes keys and values but is not part of the model, such as autocast, an
            adapter that a flag enables, or an image before the text. It may also name a user whose prefixes must not be
            shared.

    Raises:
        TypeError, ValueError: an argument is invalid, the path is not a folder, or the folder may not be read or
            written.

    Cost: each block has a file of ``layers * kv_heads * block_size * (head_dim + value_dim)`` elements. To restore a
    prefix, each of its files is read once.

    Example:
        >>> import tempfile
        >>> from saccade import caches, models
        >>> config = models.DecoderConfig(
        ...     vocab_size=9, max_len=64, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8
        ... )
        >>> model = models.Decoder(config).eval()
        >>> store = PrefixStore(tempfile.mkdtemp(), 1 << 20, fingerprint=caches.fingerprint(model), block_size=4)
        >>> text, cache = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], model.new_cache()
        >>> first = models.generate(model, [text], 3, cache=cache)
        >>> store.put(text, cache)
        2
        >>> again = model.new_cache()
        >>> known = store.restore(text, again)
        >>> known, models.generate(model, [text[known:]], 3, cache=again) == first
        (8, True)

    Reference: the chain of hashes is that of vLLM's automatic prefix caching; Kwon et al. 2023, arXiv:2309.06180.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        fingerprint: str,
        block_size: int = 64,
        salt: str = "",
    ):
        hint = "caches.fingerprint(model)"
        self.folder, self.max_bytes = checked_path("folder", folder), check_int("max_bytes", max_bytes)
        self.block_size = check_int("block_size", block_size)
        self.fingerprint = check_type("fingerprint", fingerprint, str, "be a string", hint=hint)
        self.salt = check_type("salt", salt, str, "be a string")
        if not fingerprint:
            raise value_error("fingerprint", "name a model", "''", hint=hint)
        self._blocks = BlockFolder(self.folder, max_bytes)
        self._root = _hash([VERSION, fingerprint, salt, block_size])

    @property
    def nbytes(self) -> int:
        """Total size of the stored files in bytes, including those of other models and salts."""
        return self._blocks.nbytes

    def find(self, tokens: Sequence[int]) -> int:
        """Return the number of stored tokens at the beginning of a sequence. No file is read."""
        chain = self._chain(tokens)
        return self.block_size * next((i for i, key in enumerate(chain) if not self._blocks.has(key)), len(chain))

    def restore(self, tokens: Sequence[int], cache: Cache | LayerCache, *, device: torch.device | str = "cpu") -> int:
        """Fill an empty cache with the stored prefix of a sequence.

        Args:
            tokens: the tokens of one sequence.
            cache: an empty cache with a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, for batch size
                1.
            device: the device of the model.

        Returns:
            The number of tokens in the cache. It never includes the last token, which the model must read to predict
            the next. Continue with ``tokens[returned:]``.

        Raises:
            ValueError, UnsupportedError: the cache is not empty, or cannot be filled.
        """
        size = self.block_size
        layers = _layers(cache)
        if any(layer.length for layer in layers):
            raise value_error("cache", "be empty", f"{layers[0].length} columns", hint="crop(0)")
        chain = self._chain(tokens)
        parts: list[list[Tensor]] = []
        for i, key in enumerate(chain[: max(0, len(tokens) - 1) // size]):
            part = self._read_block(key, list(tokens[i * size : (i + 1) * size]), len(layers))
            if part is None or (parts and any(map(_differ, part, parts[0]))):
                break
            parts.append(part)
        self._blocks.touch(chain[: len(parts)])
        for i, layer in enumerate(layers if parts else ()):
            layer.fill(*(torch.cat([part[2 * i + which] for part in parts], 2).to(device) for which in (0, 1)))
        return len(parts) * size

    def put(self, tokens: Sequence[int], cache: Cache | LayerCache) -> int:
        """Store the full blocks of a sequence whose keys and values are in a cache.

        Args:
            tokens: the tokens of the sequence; the cache starts with them and may contain more.
            cache: a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, with batch size 1 and positions 0,
                1, 2, …

        Returns:
            The number of new blocks. Keys computed after a step that skipped blocks are not exact, so they are not
            stored. Blocks for which there is no room in ``max_bytes`` are not stored either.

        Raises:
            ValueError, UnsupportedError: the cache has the wrong type, a batch size other than 1, or positions that do
                not start at 0 or have gaps, or it contains fewer tokens than ``tokens``.
        """
        layers = _layers(cache)
        chain, length = self._chain(tokens), layers[0].length
        if length < len(tokens):
            raise value_error("tokens", f"be in the cache, so at most {length} tokens", len(tokens))
        states = [_single_sequence(layer) for layer in layers]
        written, known = 0, 0
        for i, key in enumerate(chain[: min(layer.exact_len for layer in layers) // self.block_size]):
            span = slice(i * self.block_size, (i + 1) * self.block_size)
            if not self._blocks.has(key):
                tensors = {
                    f"{number}.{name}": x[:, :, span]
                    for number, state in enumerate(states)
                    for name, x in state.items()
                }
                about = {"kind": _KIND, "key": key, "tokens": list(tokens[span])}
                if not self._blocks.write(key, encoded(tensors, about), set(chain[: i + 1])):
                    break
                written += 1
            known = i + 1
        self._blocks.touch(chain[:known])
        return written

    def clear(self) -> None:
        """Remove the stored prefixes of all models.

        Raises:
            ValueError: some files could not be removed; all others are removed.
        """
        self._blocks.clear()

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, {self.max_bytes}, block_size={self.block_size})"

    def _chain(self, tokens: Sequence[int]) -> list[str]:
        """Return the keys of a sequence's full blocks: each is a hash of the previous key and the block's tokens."""
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        if not is_list or not all(type(token) is int for token in given):
            raise type_error("tokens", "be the tokens of one text, a list of ints", type(tokens).__name__)
        key, chain = self._root, []
        for start in range(0, len(given) - self.block_size + 1, self.block_size):
            key = _hash([key, list(given[start : start + self.block_size])])
            chain.append(key)
        return chain

    def _read_block(self, key: str, tokens: list[int], layers: int) -> list[Tensor] | None:
        """Return the stored keys and values of a block for each layer, or None if it is missing or damaged."""
        raw = self._blocks.read(key)
        if raw is None:
            return None
        names = [f"{i}.{which}" for i in range(layers) for which in ("key", "value")]
        try:
            tensors, about = decoded(raw, _KIND)
        except ValueError:
            tensors, about = {}, {}
        is_this_block = about.get("key") == key and about.get("tokens") == tokens and set(tensors) == set(names)
        pairs = [tensors[name] for name in names] if is_this_block else []
        if pairs and all(self._fits(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)):
            return pairs
        self._blocks.remove(key)
        return None

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        """Return whether two tensors can be the keys and values of one block of a prefix."""
        is_alike = key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3] and key.dtype == value.dtype
        return is_alike and key.is_floating_point() and (len(key), key.shape[2]) == (1, self.block_size)


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether two blocks differ in width or dtype, so that they cannot belong to one sequence."""
    return one.shape != other.shape or one.dtype != other.dtype


def _single_sequence(layer: KVCache) -> dict[str, Tensor]:
    """Return a layer's cached keys and values. Raise an error unless they are one sequence from position 0 on."""
    key, value = layer.key, layer.value
    if not isinstance(layer.kv_positions, range) or layer.kv_positions != range(layer.length):
        raise value_error(
            "cache", "contain tokens at positions 0, 1, 2, …", "other positions", hint="one text, unpadded"
        )
    if key is None or value is None or len(key) != 1:
        got, hint = 0 if key is None else len(key), "reorder([b]) of a fork keeps item b"
        raise value_error("cache", "contain a batch of one", got, hint=hint)
    return {"key": key, "value": value}


def _layers(cache: Cache | LayerCache) -> list[KVCache]:
    """Return the caches of all layers. Raise an error unless each of them stores the keys of all tokens."""
    check_type("cache", cache, (Cache, LayerCache), "be a cache")
    layers: list[KVCache] = []
    for layer in cache.flat if isinstance(cache, Cache) else (cache,):
        if not isinstance(layer, KVCache):
            reason = f"a {type(layer).__name__} does not store the keys of all tokens"
            raise unsupported("PrefixStore", [reason], hint="KVCache and BlockSelectCache do")
        layers.append(layer)
    return layers


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights, their dtypes, its configuration and its structure.

    Two models with the same fingerprint compute the same keys and values for the same tokens at the same positions. A
    changed weight, dtype, rotation base, mask or adapter changes the fingerprint. Things that are not part of the
    module (autocast, a mask passed to the call, an image before the text) do not change it; include them in the
    ``salt`` of a `PrefixStore`.

    Args:
        model: a module; its ``config``, if it has one, is included.

    Returns:
        64 hexadecimal digits, the same in every process.

    Raises:
        TypeError: ``model`` is not a module.

    Cost: reads every weight once.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = fingerprint(layer)
        >>> with torch.no_grad():
        ...     _ = layer.bias.add_(1)
        >>> fingerprint(layer) == before
        False
    """
    if not isinstance(model, nn.Module):
        raise type_error("model", "be a torch module", type(model).__name__)
    digest = hashlib.sha256()
    digest.update(f"{type(model).__qualname__}\n{model!r}\n{getattr(model, 'config', None)!r}\n".encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in sorted(tensors):
        x = tensors[name].detach()
        digest.update(f"{name} {x.dtype} {list(x.shape)}\n".encode())
        if x.numel():
            digest.update(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
