"""`openai:URL` before servers that are none, that refuse, break off or hang: an error in words, and nobody waits."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import torch

from weft.errors import ConfigError
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.engines import openai
from weft.testing.engines.interface import Job, ModelUnderTest
from weft.testing.tiny import save_tiny_model

CHOICE = {"text": "a", "finish_reason": "length", "token_ids": [1], "logprobs": {"token_logprobs": [-0.5]}}
JOB = Job(prompt_token_ids=(40,), max_new_tokens=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelUnderTest:
    name = str(save_tiny_model(tmp_path_factory.mktemp("served"), "llama", num_hidden_layers=1))
    return ModelUnderTest(
        name=name, checkpoint=open_checkpoint(name), dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
    )


class Scripted(BaseHTTPRequestHandler):
    """Says what the test wrote: a status and a body, or None to break off. `later`: to all but the first requests."""

    models: ClassVar[Any] = (200, '{"data": [{"id": "m"}]}')
    probes: ClassVar[Any] = (200, json.dumps({"choices": [CHOICE]}))
    later: ClassVar[Any] = None
    let_go: ClassVar[threading.Event] = threading.Event()

    def do_GET(self) -> None:
        self._say(self.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._say(self.probes if body["max_tokens"] == 1 else self.later)

    def _say(self, script: Any) -> None:
        if script == "wait":
            self.let_go.wait()
            script = None
        if script is None:
            self.close_connection = True
            return
        status, text = script
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 (the base class's name)


class Server(ThreadingHTTPServer):
    request_queue_size = 64  # a connection that finds the queue full is tried again after a second


@pytest.fixture
def script() -> type[Scripted]:
    return type("Script", (Scripted,), {"let_go": threading.Event()})


@pytest.fixture
def url(script: type[Scripted]) -> Iterator[str]:
    with Server(("127.0.0.1", 0), script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        script.let_go.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "argument",
    [
        *("8000", "127.0.0.1:8000", "http://", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://[::1"),
        *("ftp://127.0.0.1", "file:///etc", "http://a b", "http://127.0.0.1/\n", "http://127.0.0.1/ü"),
    ],
)
def test_what_is_no_url_of_a_server_is_refused_with_one_that_is(model: ModelUnderTest, argument: str) -> None:
    with pytest.raises(ConfigError, match=r"is no URL of a server\nhint: openai:http://127.0.0.1:8000"):
        openai.ENGINE(model, argument)


@pytest.mark.parametrize(
    ("where", "says", "message"),
    [
        ("models", (200, "<html>It works!</html>"), "/models gives no JSON: <html>It works!</html>"),
        ("models", (200, "[]"), r"/models lists no models: \[\]"),
        ("models", None, "RemoteDisconnected"),
        ("probes", (200, "<html>"), "completes nothing: /completions gives no JSON: <html>"),
        (
            "probes",
            (200, '{"error": "busy"}'),
            'completes nothing: an answer without a choice: {"error": "busy"}',
        ),
        ("probes", (200, '{"choices": []}'), "completes nothing: an answer without a choice"),
        ("probes", None, "completes nothing: RemoteDisconnected"),
        ("probes", (401, "who are you?"), "401.*who are you.\nhint: no key is sent"),
    ],
    ids=str,
)
def test_a_server_that_speaks_another_language_is_an_error_that_shows_what_it_said(
    model: ModelUnderTest, script: type[Scripted], url: str, where: str, says: Any, message: str
) -> None:
    setattr(script, where, says)
    with pytest.raises(ConfigError, match=message):
        openai.ENGINE(model, url)


@pytest.mark.parametrize(
    ("where", "limit", "path"),
    [("models", "_LISTING_TIMEOUT_S", "/models"), ("probes", "_TIMEOUT_S", "/completions")],
    ids=["models", "probes"],
)
def test_a_server_that_never_answers_is_waited_for_no_longer_than_was_said(
    model: ModelUnderTest,
    script: type[Scripted],
    url: str,
    where: str,
    limit: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai, limit, 0.05)
    setattr(script, where, "wait")
    with pytest.raises(ConfigError, match=rf"no answer to {path} within 0\.05 s"):
        openai.ENGINE(model, url)


def test_an_answer_without_its_end_is_an_ability_that_the_server_lacks(
    model: ModelUnderTest, script: type[Scripted], url: str
) -> None:
    script.probes = script.later = (200, '{"choices": [{"text": "a", "token_ids": "abc", "logprobs": ["x"]}]}')
    engine = openai.ENGINE(model, url)
    assert {"finish_reasons", "token_ids", "logprobs"} <= engine.lacks.keys()
    (answer,) = engine.answer([JOB])
    assert (answer.said, answer.finish_reason, answer.logprobs) == ("a", None, None)


@pytest.mark.parametrize(("says", "message"), [(None, "RemoteDisconnected"), ((200, "<html>"), "gives no JSON")])
def test_a_server_that_breaks_off_later_fails_the_request_in_words(
    model: ModelUnderTest, script: type[Scripted], url: str, says: Any, message: str
) -> None:
    script.later = says
    with pytest.raises(openai.NoAnswerError, match=message):
        openai.ENGINE(model, url).answer([JOB] * 3)


def test_answers_come_in_the_order_of_the_jobs_and_more_jobs_than_threads_are_all_answered(
    model: ModelUnderTest, script: type[Scripted], url: str
) -> None:
    def say(handler: Scripted, body: dict[str, Any]) -> None:
        time.sleep(0.01 * (body["max_tokens"] % 3))
        handler._say((200, json.dumps({"choices": [{**CHOICE, "text": str(body["max_tokens"])}]})))

    script.do_POST = lambda self: say(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))  # type: ignore[method-assign]
    lengths = range(2, 2 + model.max_num_seqs + 3)
    jobs = [Job(prompt_token_ids=(40,), max_new_tokens=length) for length in lengths]
    assert [answer.text for answer in openai.ENGINE(model, url).answer(jobs)] == [str(length) for length in lengths]


def test_whoever_interrupts_does_not_wait_for_a_server_that_hangs(
    model: ModelUnderTest, script: type[Scripted], url: str
) -> None:
    script.later = "wait"
    engine = openai.ENGINE(model, url)
    before = {*threading.enumerate()}

    def ask() -> None:
        with pytest.raises(openai.NoAnswerError):
            engine.answer([JOB] * 2)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 60
    while len({*threading.enumerate()} - before) < 1 + 2 + 2:  # who asks, two requests, two handlers
        assert time.monotonic() < deadline, "the requests do not begin"
        time.sleep(0.005)
    others = {*threading.enumerate()} - before - {asking}
    requests = {thread for thread in others if "process_request" not in thread.name}
    assert len(requests) == 2
    assert all(thread.daemon for thread in requests), "the end of the program would wait for the server"
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "it waits for answers, and none is let go yet"
    script.let_go.set()
    asking.join()
