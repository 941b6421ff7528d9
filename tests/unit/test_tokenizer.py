"""A checkpoint's own tokenizer: special tokens as its authors meant them, text back without them."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from weft.errors import CheckpointNotFoundError, RequestError
from weft.output_processor import Tokenizer as TokenizerOfTexts
from weft.tokenizer.hub import HubTokenizer

BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant]"
)


def save_tokenizer(folder: Path, *, bos: bool) -> Path:
    """A byte-level BPE of 280 tokens, which puts a BOS before every text or does not."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the weft runs across the warp, over and under, row by row"] * 2, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    outer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["no BOS", "BOS"])
def prefix(request: pytest.FixtureRequest) -> list[int]:
    return [BOS] if request.param else []


@pytest.fixture(scope="module")
def tokenizer(prefix: list[int], tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    return HubTokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), bos=bool(prefix)))


def test_a_hub_tokenizer_decodes_for_the_output_processor(tokenizer: HubTokenizer) -> None:
    assert isinstance(tokenizer, TokenizerOfTexts)


@given(text=st.text())
@example(text="spaces before . , ? and n't are kept ,  as 's")
def test_text_survives_the_round_trip_with_its_spaces(tokenizer: HubTokenizer, prefix: list[int], text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[: len(prefix)] == prefix
    assert BOS not in ids[len(prefix) :] or "<s>" in text
    if "<s>" not in text and "</s>" not in text:
        assert tokenizer.decode(ids) == text


def test_special_tokens_are_not_text(tokenizer: HubTokenizer) -> None:
    ids = tokenizer.encode("row by row")
    assert tokenizer.decode([BOS, *ids, EOS]) == "row by row"


@pytest.mark.parametrize("text", ["\ud800", "ab\udcff"])
def test_half_of_a_surrogate_pair_is_refused(tokenizer: HubTokenizer, text: str) -> None:
    with pytest.raises(RequestError, match=rf"character {len(text) - 1} of the text"):
        tokenizer.encode(text)


def test_a_conversation_is_the_models_own_template_and_ends_where_the_assistant_speaks(
    tokenizer: HubTokenizer,
) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert tokenizer.chat(messages) == "<s>[system] be brief\n[user] hello\n[assistant]"


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'], ids=["none", "no JSON", "no model"])
def test_a_folder_without_a_tokenizer_says_so_and_what_would_work(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointNotFoundError, match="has no tokenizer that can be loaded") as caught:
        HubTokenizer(tmp_path)
    assert "skip_tokenizer_init=True" in str(caught.value.hint)
