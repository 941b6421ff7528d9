"""`openai:URL` against a server of others' making: `transformers serve`, on loopback, over a tiny model."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.unit.made_tokenizers import byte_level, save
from weft.errors import ConfigError
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.engine_report import EngineReport, try_engine
from weft.testing.engines import open_engine
from weft.testing.engines.interface import ModelUnderTest
from weft.testing.finding import Outcome
from weft.testing.tiny import save_tiny_model
from weft.tokenizer.hub import HubTokenizer

TEXTS = ("over", "the weft runs across the warp", "row by row, over and under")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
    folder = save(byte_level(), tmp_path_factory.mktemp("served"), added=())
    tokenizer = HubTokenizer(folder)
    fields = {"vocab_size": len(tokenizer.inner), "num_hidden_layers": 1, "eos_token_id": [3, 57, 90, 200]}
    name = str(save_tiny_model(folder, "llama", seed=3, max_position_embeddings=512, **fields))
    return ModelUnderTest(
        name=name,
        checkpoint=open_checkpoint(name),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=320,
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def server(model: ModelUnderTest) -> Iterator[str]:
    """The URL of a live `transformers serve`, which runs in a thread of this process."""
    from transformers.cli.serve import Serve

    class ServeInThread(Serve):
        def start_server(self) -> None:
            """As its own, but its event loop is closed in the end, and it listens where nobody else can have come."""
            self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [own]})
            self._thread.start()

    own = socket.socket()
    own.bind(("127.0.0.1", 0))
    port = own.getsockname()[1]
    logging.getLogger("uvicorn.access").disabled = True
    peer = ServeInThread(
        force_model=model.path,
        host="127.0.0.1",
        port=port,
        device="cpu",
        dtype="float32",
        non_blocking=True,
        log_level="error",
    )
    deadline = time.monotonic() + 60
    while not peer.server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    peer.kill_server()
    peer._thread.join(60)  # its own patience is two seconds, and the next module would have the rest of it


@pytest.fixture(scope="module")
def report(server: str, model: ModelUnderTest) -> EngineReport:
    assert model.tokenizer is not None
    prompts = [tuple(model.tokenizer.encode(text)) for text in TEXTS]
    return try_engine(f"openai:{server}", model, prompts, max_new_tokens=8)


def test_a_live_peer_server_is_judged_by_what_it_can_do(report: EngineReport) -> None:
    found = {finding.law: finding.outcome for finding in report.findings}
    assert {law for law, outcome in found.items() if outcome is Outcome.HOLDS} == {
        "tokens equal huggingface",
        "finish reasons equal huggingface",
        "prompts at the edges of blocks equal huggingface",
        "an answer ends at its own length",
        "batch mates change nothing",
        "a prompt again says the same",
    }


def test_what_the_server_refuses_is_not_judged_and_said_in_its_own_words(report: EngineReport) -> None:
    words = {finding.law: finding.words for finding in report.findings if finding.outcome is Outcome.NOT_JUDGED}
    assert "Unexpected fields in the request: {'stop_token_ids'}" in words["stop token ids end an answer"]
    assert "prompt must be a string" in words["flips lie within huggingfaces own noise"]
    assert "takes logprobs and gives none" in words["logprobs equal huggingface"]


def test_the_servers_seeds_draw_nothing_and_that_is_reported(report: EngineReport) -> None:
    """Facts about transformers 5.17 to 5.24: a temperature alone does not turn sampling on there, so all is greedy."""
    (broken,) = [finding for finding in report.findings if finding.outcome is Outcome.BROKEN]
    assert broken.law == "a seed reproduces and another differs"
    assert broken.words.endswith("seeds draw the same answer")
    assert not report.passed


def test_a_server_whose_dtype_nobody_named_is_not_held_to_equality(server: str, model: ModelUnderTest) -> None:
    engine = open_engine(f"openai:{server}", replace(model, dtype_is_given=False))
    engine.close()
    assert "the server chose it" in engine.lacks["dtype"]


class Deaf(BaseHTTPRequestHandler):
    """Lists a model and completes nothing."""

    def do_GET(self) -> None:
        self._say(200, b'{"data": [{"id": "deaf"}]}')

    def do_POST(self) -> None:
        self._say(500, b'{"error": "out of memory"}')

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 (the base class's name)


def test_a_server_that_is_not_there_is_named(model: ModelUnderTest) -> None:
    with pytest.raises(ConfigError, match="needs the server's URL"):
        open_engine("openai", model)
    with socket.socket() as silent:  # it has a port, so that nobody else listens there, and does not listen either
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(ConfigError, match="no OpenAI-compatible server answers"):
            open_engine(f"openai:http://127.0.0.1:{silent.getsockname()[1]}", model)


def test_a_server_that_refuses_a_plain_completion_is_refused_with_its_words(
    model: ModelUnderTest,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Deaf) as deaf:
        thread = threading.Thread(target=deaf.serve_forever)
        thread.start()
        try:
            with pytest.raises(ConfigError, match="out of memory"):
                open_engine(f"openai:http://127.0.0.1:{deaf.server_address[1]}", model)
        finally:
            deaf.shutdown()
            thread.join()
