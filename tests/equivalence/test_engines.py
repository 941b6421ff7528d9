"""Laws of any engine: weft, HuggingFace and its continuous batching by default, another by `--engine NAME`.

HuggingFace's `generate` is the control: judged by itself, it has to be acquitted by every law.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.made_tokenizers import byte_level, save
from weft.config import ModelConfig
from weft.inference.placement import place
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.engines import open_engine
from weft.testing.engines.interface import ModelUnderTest
from weft.testing.exactness import SAFE_MARGIN
from weft.testing.finding import Outcome
from weft.testing.laws import LAWS, Law, judge
from weft.testing.oracle import Oracle
from weft.testing.reference import Remembered
from weft.testing.tiny import save_tiny_model
from weft.testing.trial import EDGES, Trial
from weft.tokenizer.hub import HubTokenizer

pytestmark = pytest.mark.engine

MAX_NEW_TOKENS = 8
TEXTS = (
    "over",
    "the weft runs across the warp, over and under",
    "Der Schuss läuft quer zur Kette, über und unter ihr",
    "row by row, 你好, under",
)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
    """The model that `--engine-model` names, or a tiny one with a tokenizer and three EOS ids."""
    name = request.config.getoption("--engine-model")
    if name is None:
        folder = save(byte_level(), tmp_path_factory.mktemp("engines"), added=())
        size = len(HubTokenizer(folder).inner)
        fields = {"vocab_size": size, "num_hidden_layers": 1, "head_dim": 32, "eos_token_id": [3, 57, 90, 200]}
        name = str(save_tiny_model(folder, "llama", seed=3, max_position_embeddings=512, **fields))
    checkpoint = open_checkpoint(name)
    dtype = request.config.getoption("--engine-dtype")
    placement = place(ModelConfig(model=name, dtype=dtype or "float32", device="cpu"), checkpoint.stored_dtype)
    return ModelUnderTest(
        name=name,
        checkpoint=checkpoint,
        dtype=placement.dtype,
        device=placement.device,
        max_model_len=400,
        dtype_is_given=dtype is not None or not request.config.getoption("--engine"),
        tokenizer=HubTokenizer(checkpoint.tokenizer.folder, checkpoint.tokenizer.gguf_file),
    )


@pytest.fixture(scope="module")
def reference(model: ModelUnderTest) -> Remembered:
    return Remembered(Oracle(model.checkpoint.tokenizer, dtype=model.dtype, device=model.device))


@pytest.fixture(scope="module")
def trial(engine_name: str, model: ModelUnderTest, reference: Remembered) -> Iterator[Trial]:
    assert model.tokenizer is not None
    prompts = [tuple(model.tokenizer.encode(text)) for text in TEXTS]
    engine = open_engine(engine_name, model)
    yield Trial(engine=engine, reference=reference, model=model, prompts=prompts, max_new_tokens=MAX_NEW_TOKENS)
    engine.close()


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.judge.__name__)
def test_law(trial: Trial, law: Law) -> None:
    finding = judge(law, trial)
    if finding.outcome is Outcome.NOT_JUDGED:
        pytest.skip(finding.words)
    assert finding.outcome is Outcome.HOLDS, finding.words


def test_the_tiny_model_can_convict(trial: Trial, request: pytest.FixtureRequest) -> None:
    """Wide margins, so that no difference is a tie; answers that vary; both ways to end."""
    if request.config.getoption("--engine-model") is not None or trial.model.dtype != torch.float32:
        pytest.skip("the model is the user's, or margins are not float32's")
    edges = [trial.reference.generate(prompt, MAX_NEW_TOKENS) for prompt in trial.prompts_of(EDGES)]
    said = [*trial.references, *edges]
    assert min(float(one.margins.min()) for one in said) >= SAFE_MARGIN
    assert {one.finish_reason for one in trial.references} == {"stop", "length"}
    assert len({token for one in said for token in one.token_ids}) >= 40
