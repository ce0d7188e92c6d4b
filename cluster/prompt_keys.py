"""From the text of a prompt to its block keys, as a gateway of the cluster makes them."""

from __future__ import annotations

from pathlib import Path

from moonpool.cluster.groups import belongs
from moonpool.core.blocks import BlockHasher, key_id, load_hash_key, namespace
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError, InvalidRequest
from moonpool.core.layout import KVLayout
from moonpool.core.membership import Member


def layout_of(stores: list[Member]) -> KVLayout:
    """The layout that the nodes announce. ConfigError where they announce none, or several."""
    found = {m.layout for m in stores if m.layout is not None}
    if len(found) != 1:
        raise ConfigError(f"layout: the store nodes announce {len(found)} KV layouts; name blocks by --keys", param="layout")
    return found.pop()


def prompt_keys(config: Config, stores: list[Member], text: str, *, chat: bool = False) -> list[bytes]:
    """Keys of the whole blocks of ``text``: a raw completion prompt, or with ``chat`` one user message.

    Tokenised by the model in ``config``, hashed with its hash key. ConfigError where either is not the cluster's own or
    not here; InvalidRequest where the text fills no block.
    """
    from moonpool.cluster.gateway.tokenizer import Tokenizer
    from moonpool.cluster.models import local_model

    served = {m.model for m in stores if m.model}
    if served and config.model_name not in served:
        raise ConfigError(
            f"model.path: {config.model_name!r} is not served here, {', '.join(sorted(served))} is; give its path by "
            "--set model.path=PATH",
            param="model.path",
        )
    layout, hash_key = layout_of([m for m in stores if belongs(m, config.model_name)]), _hash_key(config, stores)
    tokenizer = Tokenizer.load(local_model(config.model.path, lambda _: None))
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    keys = BlockHasher(hash_key, namespace(layout), layout.block_tokens).keys(ids)
    if not keys:
        raise InvalidRequest(
            f"--prompt: {len(ids)} tokens fill no block of {layout.block_tokens}; only whole blocks have keys", param="prompt"
        )
    return keys


def _hash_key(config: Config, stores: list[Member]) -> bytes:
    """The cluster's hash key, which a process of it made: none is made here."""
    path = config.key_file(Path.home())
    hint = "give the cluster's own by --set cluster.key_file=FILE"
    if not path.exists():
        raise ConfigError(f"cluster.key_file: there is no hash key in {path}; {hint}", param="cluster.key_file")
    hash_key = load_hash_key(path)
    theirs = {m.hash_key_id for m in stores if m.hash_key_id}
    if theirs and key_id(hash_key) not in theirs:
        raise ConfigError(f"cluster.key_file: {path} holds another hash key; {hint}", param="cluster.key_file")
    return hash_key
