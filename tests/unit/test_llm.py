"""The offline face: outputs in the order of the prompts, and a call either is served whole or changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_tokenizer import BOS, save_tokenizer
from weft import LLM, SamplingParams
from weft.errors import (
    ConfigError,
    ContextLengthError,
    EmptyPromptError,
    InvalidPromptsError,
    RequestError,
    SamplingParamsError,
    TokenOutOfRangeError,
    UnknownArgumentError,
)
from weft.testing.tiny import save_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
VOCAB, CONTEXT = 280, 64


def save_text_model(folder: Path, *, bos: bool) -> Path:
    save_tokenizer(folder, bos=bos)
    return save_tiny_model(
        folder,
        "llama",
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        eos_token_id=1,
        initializer_range=0.5,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("text"), bos=False)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=2)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(save_text_model(tmp_path_factory.mktemp("bos"), bos=True)))


@pytest.fixture(scope="module")
def tokens_only(folder: Path) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True)


@pytest.fixture
def with_defaults(folder: Path, tmp_path: Path) -> Callable[..., LLM]:
    """The model as if its authors had set these fields of its generation config."""

    def build(**fields: Any) -> LLM:
        copytree(folder, tmp_path, dirs_exist_ok=True)
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        return LLM(str(tmp_path))

    return build


def texts(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[str | None]:
    return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def test_outputs_come_in_the_order_of_the_prompts_whatever_ends_first(llm: LLM) -> None:
    prompts = ["row by row", "over", "the warp", "under and", "weft"]
    lengths = [5, 1, 6, 2, 4]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.outputs[0].text for output in outputs] == [
        text for prompt, param in zip(prompts, params, strict=True) for text in texts(llm, prompt, param)
    ]


@pytest.mark.parametrize(
    ("form", "prompt"),
    [
        ("row", "row"),
        ({"prompt": "row"}, "row"),
        ([114, 7, 9], None),
        ((114, 7, 9), None),
        ({"prompt_token_ids": [114, 7, 9]}, None),
    ],
)
def test_one_prompt_of_any_form_is_a_list_of_one(form: Any, prompt: str | None, llm: LLM) -> None:
    (output,) = llm.generate(form, GREEDY, use_tqdm=False)
    (listed,) = llm.generate([form], [GREEDY], use_tqdm=False)
    assert output.outputs == listed.outputs
    assert (output.prompt, output.finished) == (prompt, True)
    assert output.prompt_token_ids == ([114, 7, 9] if prompt is None else llm.tokenizer.encode("row"))  # type: ignore[union-attr]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_text_is_what_the_tokens_say_without_the_stop_token(llm: LLM) -> None:
    (free,) = llm.generate("warp", GREEDY, use_tqdm=False)
    token_ids = free.outputs[0].token_ids
    stop = next(token for place, token in enumerate(token_ids) if place and token not in token_ids[:place])
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    (stopped,) = llm.generate("warp", params, use_tqdm=False)
    kept = token_ids[: token_ids.index(stop) + 1]
    assert (stopped.outputs[0].token_ids, stopped.outputs[0].stop_reason) == (kept, stop)
    assert llm.tokenizer is not None
    assert stopped.outputs[0].text == llm.tokenizer.decode(kept[:-1])


def test_an_empty_text_is_served_where_the_tokenizer_gives_it_a_bos(with_bos: LLM) -> None:
    (output,) = with_bos.generate("", GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("", [BOS])
    assert len(output.outputs[0].token_ids) == 6


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("prompts", "index", "error", "message"),
    [
        ("", 0, EmptyPromptError, "no tokens"),
        ([[]], 0, EmptyPromptError, "no tokens"),
        (["ok", ""], 1, EmptyPromptError, "no tokens"),
        ([[5], [5, VOCAB]], 1, TokenOutOfRangeError, "280 tokens"),
        ([5, -1], 0, TokenOutOfRangeError, "-1"),
        ([5, 10**5000], 0, TokenOutOfRangeError, r"prompt_token_ids\[1\]=a number of 16610 bits"),
        ({"prompt": [10**5000]}, 0, RequestError, "a dict that holds a number"),
        ([[5] * CONTEXT], 0, ContextLengthError, "64 tokens"),
        ([5, "a"], 0, RequestError, "must be an integer"),
        (["a", 5], 1, RequestError, "got 5"),
        (["a", None], 1, RequestError, "got None"),
        (b"abc", 0, RequestError, "got b'abc'"),
        (5, 0, RequestError, "got 5"),
        ({}, 0, RequestError, "one key"),
        ({"promt": "a"}, 0, RequestError, "did you mean 'prompt'"),
        ({"prompt": "a", "prompt_token_ids": [5]}, 0, RequestError, "one key"),
        ({"prompt": [5]}, 0, RequestError, "prompt holds a text"),
        ({"prompt_token_ids": "a"}, 0, RequestError, "prompt_token_ids a list"),
        ({"prompt": {"prompt": "a"}}, 0, RequestError, "prompt holds a text"),
        (["a", "b", "\udcff"], 2, RequestError, "no Unicode"),
    ],
)
def test_one_bad_prompt_raises_its_own_error_and_none_is_served(
    prompts: Any, index: int, error: type[RequestError], message: str, llm: LLM
) -> None:
    with pytest.raises(error, match=rf"^prompts\[{index}\]: (.|\n)*{message}") as caught:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert type(caught.value) is error
    assert caught.value.index == index
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("model", ["llm", "tokens_only"])
def test_several_bad_prompts_raise_one_error_that_holds_them_all(model: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(model)
    with pytest.raises(InvalidPromptsError) as caught:
        llm.generate([[5], [], [VOCAB], [6], [5] * 99], GREEDY, use_tqdm=False)
    kinds = {index: type(error) for index, error in caught.value.errors.items()}
    assert kinds == {1: EmptyPromptError, 2: TokenOutOfRangeError, 4: ContextLengthError}
    assert all(f"prompts[{index}]: " in str(caught.value) for index in kinds)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operations": "fused"}, "operations='fused' are Triton kernels"),
        ({"kernel_choice": "few_rows"}, "kernel_choice='few_rows' has no effect"),
        ({"device": "tpu"}, "unknown device='tpu'"),
        ({"max_model_len": CONTEXT + 1}, "max_model_len=65 exceeds"),
        ({"attention_backend": "pagd_gather"}, "pagd_gather"),
        ({"attention_backend": "paged_triton"}, "attention_backend='paged_triton' cannot run this model"),
        ({"attention_backend": "contiguous", "block_size": 16}, "block_size=16 says nothing to the contiguous backend"),
    ],
)
def test_what_cannot_run_here_is_refused_before_the_tokenizer_is_read(
    options: dict[str, Any], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("weft.llm.HubTokenizer", lambda *_: pytest.fail("the tokenizer was read"))
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(str(folder), **({"device": "cpu"} | options))
    assert caught.value.hint


def test_without_a_tokenizer_token_ids_are_served_and_text_is_refused(tokens_only: LLM, llm: LLM) -> None:
    (output,), (texted,) = (model.generate([9, 8], GREEDY, use_tqdm=False) for model in (tokens_only, llm))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == (None, texted.outputs[0].token_ids)
    with pytest.raises(
        RequestError, match=r"prompts\[0\]: a text prompt, 'row', needs a tokenizer.*\nhint: give token ids"
    ):
        tokens_only.generate("row", GREEDY)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "2 prompts but 1 sampling_params"),
        ([], "2 prompts but 0 sampling_params"),
        ([GREEDY] * 3, "2 prompts but 3 sampling_params"),
        ([GREEDY, {"temperature": 0}], r"sampling_params\[1\] must be SamplingParams"),
    ],
)
def test_params_are_one_for_all_or_one_for_each(params: Any, message: str, llm: LLM) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0)),
        ({"temperature": 0.6, "do_sample": True}, SamplingParams(temperature=0.6)),
        ({"max_new_tokens": 3}, SamplingParams(max_tokens=3)),
        ({"temperature": None, "max_new_tokens": None, "top_k": None}, SamplingParams()),
        ({"top_p": 1.0, "top_k": 0, "repetition_penalty": 1, "suppress_tokens": []}, SamplingParams()),
        ({"do_sample": True}, SamplingParams()),  # HuggingFace's own top_k=50 is no setting of the authors
    ],
)
def test_the_models_own_defaults_are_read(
    fields: dict[str, Any], expected: SamplingParams, with_defaults: Callable[..., LLM]
) -> None:
    llm = with_defaults(**fields)
    assert llm.default_sampling_params() == expected
    (output,) = llm.generate([9, 8], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= (expected.max_tokens or 0)


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "typical_p": 0.5,
        "no_repeat_ngram_size": 2,
        "min_length": 2,
        "num_beams": 4,
        "begin_suppress_tokens": [3],
    }.items(),
)
def test_a_default_that_weft_does_not_have_is_an_error_until_params_are_given(
    name: str, value: Any, with_defaults: Callable[..., LLM]
) -> None:
    llm = with_defaults(**{name: value})
    with pytest.raises(ConfigError, match=rf"generation_config sets {name}=") as caught:
        llm.generate([9, 8])
    assert "SamplingParams" in str(caught.value.hint)
    assert len(texts(llm, [9, 8])) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_every_eos_of_the_generation_config_ends_a_text(
    place: int, llm: LLM, with_defaults: Callable[..., LLM]
) -> None:
    free = llm.generate([9, 8], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    eos = [free[2], 279] if place == 0 else [279, free[2]]
    (output,) = with_defaults(eos_token_id=eos, do_sample=False).generate([9, 8], use_tqdm=False)
    assert output.outputs[0].token_ids == free[: free.index(free[2]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", free[2])


@pytest.mark.parametrize("method", ["step", "add_request"])
def test_an_interrupt_leaves_the_engine_empty_and_able(method: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(llm, ["a", "b", "c"])
    original, calls = getattr(llm.engine, method), iter(range(9))

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if next(calls) == 1:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    assert texts(llm, ["a", "b", "c"]) == expected


def test_requests_added_by_hand_are_not_swept_away(llm: LLM) -> None:
    llm.engine.add_request("mine", [5], GREEDY)
    with pytest.raises(RequestError, match="added by hand"):
        llm.generate("row", GREEDY)
    assert [output.request_id for output in llm.engine.step()] == ["mine"]
    llm.engine.abort("mine")


@pytest.mark.parametrize("use_tqdm", [True, False])
def test_progress_is_shown_only_if_asked_for(use_tqdm: bool, llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate("row", GREEDY, use_tqdm=use_tqdm)
    out, err = capfd.readouterr()
    assert (out, "Generating" in err, err == "") == ("", use_tqdm, not use_tqdm)


def test_an_unknown_option_hints_at_the_nearest_known_one(folder: Path) -> None:
    with pytest.raises(UnknownArgumentError, match="LLM got an unknown argument 'max_modl_len'") as caught:
        LLM(str(folder), max_modl_len=8)
    assert caught.value.hint == "did you mean 'max_model_len'?"


@pytest.mark.parametrize(
    "defaults",
    [
        {"min_length": 3},
        {"max_length": 20},
        {"forced_eos_token_id": 2},
        {"sequence_bias": [[[1], 2.0]]},
        {"guidance_scale": 1.5},
        {"num_beams": 1, "typical_p": 0.5},
        {"a_field_of_tomorrow": 3},
    ],
    ids=lambda defaults: list(defaults)[-1],
)
def test_no_default_of_the_models_authors_is_dropped_in_silence(
    with_defaults: Callable[..., LLM], defaults: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=list(defaults)[-1]):
        with_defaults(**defaults).default_sampling_params()


@pytest.mark.parametrize("defaults", [{"top_p": 1.5}, {"temperature": "warm"}, {"max_new_tokens": 0}], ids=list)
def test_a_default_out_of_range_is_an_error_that_says_where_it_stands(
    with_defaults: Callable[..., LLM], defaults: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match="the model's generation_config: ") as caught:
        with_defaults(**defaults).default_sampling_params()
    assert "SamplingParams" in str(caught.value.hint)


def test_sampling_defaults_do_nothing_where_sampling_is_off(with_defaults: Callable[..., LLM]) -> None:
    params = with_defaults(do_sample=False, top_k=50, top_p=0.9, temperature=0.6).default_sampling_params()
    assert params.temperature == 0


def test_whatever_holds_integers_is_a_prompt_of_token_ids(llm: LLM, as_users_run_it: None) -> None:
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(4), seed=np.uint8(3))
    (expected,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    for prompt in (np.array([5, 6, 7]), [np.int32(5), 6, np.uint8(7)], torch.tensor([5, 6, 7]), (5, 6, 7)):
        (given,) = llm.generate(prompt, params, use_tqdm=False)
        assert given.prompt_token_ids == [5, 6, 7]
        assert all(type(token) is int for token in given.prompt_token_ids)
        assert given.outputs == expected.outputs
        (mapped,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        assert mapped.outputs == expected.outputs


@pytest.mark.parametrize("prompt", [np.array([1.0, 2.0]), torch.tensor([0.5]), [5, None], [5, 6.0]], ids=repr)
def test_what_holds_no_integers_is_refused_by_place(llm: LLM, prompt: object, as_users_run_it: None) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids\[\d\] must be an integer"):
        llm.generate([prompt], SamplingParams(), use_tqdm=False)


@pytest.mark.parametrize(
    ("method", "typo", "meant"),
    [
        ("generate", "use_tdqm", "use_tqdm"),
        ("chat", "chat_tempalte", "chat_template"),
        ("stream", "sampling_param", "sampling_params"),
        ("stream_chat", "continue_last_message", "continue_final_message"),
    ],
)
def test_an_unknown_keyword_of_a_call_gets_the_nearest_known_one(
    llm: LLM, method: str, typo: str, meant: str, as_users_run_it: None
) -> None:
    with pytest.raises(UnknownArgumentError, match=f"LLM.{method} got an unknown argument '{typo}'") as caught:
        getattr(llm, method)([5], **{typo: None})
    assert caught.value.hint == f"did you mean '{meant}'?"


def test_the_arguments_of_generate_are_checked(llm: LLM, as_users_run_it: None) -> None:
    with pytest.raises(SamplingParamsError, match="got 5"):
        llm.generate([[5]], 5)
