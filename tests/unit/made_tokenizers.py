"""Tokenizers made on the spot, one of each way to decode, as HuggingFace saves and loads them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from weft.tokenizer.hub import HubTokenizer

CORPUS = [
    "the weft runs across the warp, over and under, row by row",
    "Der Schuss läuft quer zur Kette, über und unter ihr",
    "уток идёт поперёк основы",
    "你好，世界。你好，编织",
    "    if row:\n        return over, under",
] * 3
ADDED = ["<tool>", "日本", "é"]  # the last is written in GPT-2's alphabet, and so is a byte to its decoder


def byte_level() -> Tokenizer:
    """GPT-2's way: the text is the tokens' bytes."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return inner


def byte_level_of_gguf() -> Tokenizer:
    """The same as transformers 5.17 builds it from a GGUF: SentencePiece's decoders before the one that matters."""
    inner = byte_level()
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    )
    return inner


def byte_fallback() -> Tokenizer:
    """Llama 2's way: spaces are letters, a first one is dropped, and what has no token is spelled in bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = _with_bytes(trained)
    inner = Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


def metaspace() -> Tokenizer:
    """The same vocabulary, of which the decoder knows no bytes."""
    inner = byte_fallback()
    inner.decoder = decoders.Metaspace()
    return inner


def undecoded() -> Tokenizer:
    """Without a decoder: tokens with spaces between them, the special ones too."""
    inner = byte_fallback()
    inner.decoder = None
    return inner


def _with_bytes(trained: Tokenizer) -> models.BPE:
    state = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(state["vocab"], key=state["vocab"].get)]
    merges = [tuple(pair) for pair in state["merges"]]
    return models.BPE(
        {token: place for place, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )


MADE: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "metaspace": metaspace,
    "undecoded": undecoded,
}


def save(inner: Tokenizer, folder: Path, added: Sequence[str] = ADDED, **options: str) -> Path:
    """With the special tokens <s> and </s> and the added ones."""
    inner.add_special_tokens(["<s>", "</s>"])
    inner.add_tokens([AddedToken(token, normalized=False) for token in added])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", **options).save_pretrained(
        folder
    )
    return folder


def made(name: str, folder: Path) -> HubTokenizer:
    return HubTokenizer(save(MADE[name](), folder))
