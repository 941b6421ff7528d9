"""Streams: what generate gives, piece by piece; checked at the call, and nothing left behind by whoever leaves."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_llm import GREEDY, VOCAB, save_text_model, texts
from weft import LLM, SamplingParams
from weft.errors import EmptyPromptError, RequestError, SamplingParamsError, TokenOutOfRangeError


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("streams")
    return LLM(str(save_text_model(folder, bos=False)), max_num_seqs=2)


def test_a_stream_gives_piece_by_piece_what_generate_gives(llm: LLM) -> None:
    (whole,) = llm.generate("row", GREEDY, use_tqdm=False)
    parts = list(llm.stream("row", GREEDY))
    assert "".join(part.outputs[0].text or "" for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in part.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) >= 6


def test_whoever_leaves_a_stream_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("row", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="of a stream that has not ended"):
        llm.generate("row", GREEDY)
    with pytest.raises(RequestError, match="of a stream that has not ended"):
        llm.stream("row", GREEDY)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished_requests()
    assert len(texts(llm, "row")) == 1


def test_a_stream_that_begins_late_does_not_meddle_with_another(llm: LLM) -> None:
    first, second = llm.stream("row", GREEDY), llm.stream("row", GREEDY)
    next(first)
    with pytest.raises(RequestError, match="of a stream that has not ended"):
        next(second)
    assert sum(len(part.outputs[0].token_ids) for part in first) == 5


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], GREEDY, EmptyPromptError),
        ([VOCAB], GREEDY, TokenOutOfRangeError),
        (["a", "b"], GREEDY, RequestError),
        ("a", [GREEDY], SamplingParamsError),
    ],
)
def test_a_stream_is_checked_when_it_is_asked_for(
    llm: LLM, prompt: Any, params: Any, error: type[RequestError]
) -> None:
    with pytest.raises(error):
        llm.stream(prompt, params)


def test_several_answers_to_a_prompt_come_in_their_order(llm: LLM) -> None:
    params = SamplingParams(temperature=1, n=3, seed=3, max_tokens=4, ignore_eos=True)
    outputs = llm.generate(["row", "warp"], params, use_tqdm=False)
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0, 1, 2]] * 2
    alone = SamplingParams(temperature=1, seed=5, max_tokens=4, ignore_eos=True)
    assert [output.outputs[2].text for output in outputs] == texts(llm, ["row", "warp"], alone)
