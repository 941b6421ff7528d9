"""Any server that speaks OpenAI's completions API, by its URL: `openai:http://127.0.0.1:8000`.

What the server can do is asked of it when it is opened, one thing a request: token ids as prompts and answers,
logprobs, stop ids, seeds. What it refuses it lacks, in its own words.
"""

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from weft.errors import ConfigError
from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest

_TIMEOUT_S = 600.0
_LISTING_TIMEOUT_S = 60.0  # a list of models waits for no computation
_LONGEST_REASON = 160


class NoAnswerError(Exception):
    """Nothing came back, or nothing of the kind that the API has. In words for a report."""


class OpenAiServer:
    """Requests of one call are sent at the same time, each on a connection of its own."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        """Raises: ConfigError if there is no URL, nobody answers, or the plainest request is refused."""
        if not argument:
            raise ConfigError("engine openai needs the server's URL", hint="openai:http://127.0.0.1:8000")
        self._url = _base(argument)
        self._most_at_once = model.max_num_seqs
        self._model = self._served(model)
        self.lacks: dict[Ability, str] = {"logits": "the API has none"}
        if not model.dtype_is_given:
            self.lacks["dtype"] = "the server chose it; name it (--dtype) if it is known"
        self._probe(model)
        self.description = f"server at {self._url}, model {self._model!r}"

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """Raises: RuntimeError if the server refuses a request, NoAnswerError if it does not answer one.

        Threads that no end of the program waits for: who interrupts it does not wait for the server's answer.
        """
        answers: dict[int, Answer] = {}
        errors: dict[int, Exception] = {}
        left: SimpleQueue[int] = SimpleQueue()
        for place in range(len(jobs)):
            left.put(place)

        def work() -> None:
            while True:
                try:
                    place = left.get_nowait()
                except Empty:
                    return
                try:
                    answers[place] = self._answer(jobs[place])
                except Exception as error:
                    errors[place] = error

        threads = [Thread(target=work, daemon=True) for _ in range(min(len(jobs), self._most_at_once))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[min(errors)]
        return [answers[place] for place in range(len(jobs))]

    def close(self) -> None:
        """Each request had a connection of its own."""

    def _served(self, model: ModelUnderTest) -> str:
        """The name to ask for: the only one that the server lists, else the checkpoint's path."""
        try:
            said = self._call("/models", None, _LISTING_TIMEOUT_S)
            listed = [entry["id"] for entry in said["data"]]
        except HTTPError:
            return model.path  # it answers, but lists nothing: transformers 5.17 without a hub cache does so
        except NoAnswerError as error:
            raise ConfigError(f"no OpenAI-compatible server answers at {self._url}: {error}") from error
        except (KeyError, TypeError) as error:
            words = f"/models lists no models: {_short(json.dumps(said))}"
            raise ConfigError(f"no OpenAI-compatible server answers at {self._url}: {words}") from error
        return listed[0] if len(listed) == 1 else model.path

    def _probe(self, model: ModelUnderTest) -> None:
        """Ask for each thing alone, so that each refusal has its reason."""
        text = "a" if model.tokenizer is None else model.tokenizer.decode([_PROBE_TOKEN])
        plain = {"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0}
        questions: dict[Ability, dict[str, Any]] = {
            "prompt_token_ids": {"prompt": [_PROBE_TOKEN]},
            "token_ids": {"return_token_ids": True},
            "logprobs": {"logprobs": 1},
            "stop_token_ids": {"stop_token_ids": [_PROBE_TOKEN]},
            "seeds": {"seed": 1},
        }
        try:
            choice = self._plain(plain)
        except NoAnswerError as error:
            raise ConfigError(f"the server at {self._url} completes nothing: {error}") from error
        if choice.get("finish_reason") is None:
            self.lacks["finish_reasons"] = "the server gives none"
        for ability, question in questions.items():
            try:
                choice, _ = self._complete({**plain, **question})
            except HTTPError as error:
                self.lacks[ability] = f"the server says {_reason(error)}"
                continue
            except NoAnswerError as error:
                self.lacks[ability] = f"asked for it, the server does not answer: {error}"
                continue
            if ability == "token_ids" and not _token_ids(choice):
                self.lacks[ability] = "the server takes return_token_ids and gives none"
            if ability == "logprobs" and not _logprobs(choice):
                self.lacks[ability] = "the server takes logprobs and gives none"

    def _plain(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to the plainest request; if a text is refused, `body` is given token ids.

        Raises: ConfigError if both are refused.
        """
        try:
            return self._complete(body)[0]
        except HTTPError:
            body["prompt"] = [_PROBE_TOKEN]  # a server without a tokenizer takes no text
        try:
            return self._complete(body)[0]
        except HTTPError as error:
            hint = "no key is sent: start the server without one" if error.code in (401, 403) else None
            words = f"the server at {self._url} refuses a plain completion: {_reason(error)}"
            raise ConfigError(words, hint=hint) from error

    def _answer(self, job: Job) -> Answer:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": job.prompt_text if "prompt_token_ids" in self.lacks else list(job.prompt_token_ids),
            "max_tokens": job.max_new_tokens,
            "temperature": 0 if job.seed is None else 1,
        }
        if job.seed is not None:
            body["seed"] = job.seed
        if job.stop_token_ids:
            body["stop_token_ids"] = list(job.stop_token_ids)
        if "token_ids" not in self.lacks:
            body["return_token_ids"] = True
        if "logprobs" not in self.lacks:
            body["logprobs"] = 1
        try:
            choice, num_tokens = self._complete(body)
        except HTTPError as error:
            raise RuntimeError(f"the server refuses a request: {_reason(error)}") from error
        return Answer(
            token_ids=None if "token_ids" in self.lacks else _token_ids(choice),
            text=choice.get("text"),
            num_tokens=num_tokens,
            finish_reason=choice.get("finish_reason"),
            logprobs=None if "logprobs" in self.lacks else _logprobs(choice),
        )

    def _complete(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The first choice, and how many tokens the server counts. Raises: as `_call`."""
        said = self._call("/completions", body, _TIMEOUT_S)
        choices = said.get("choices") if isinstance(said, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise NoAnswerError(f"an answer without a choice: {_short(json.dumps(said))}")
        usage = said.get("usage")
        return choices[0], usage.get("completion_tokens") if isinstance(usage, dict) else None

    def _call(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """Raises: HTTPError if the server refuses; NoAnswerError if nothing comes, or what is no JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=timeout_s) as response:
                content: bytes = response.read()
        except HTTPError:
            raise
        except TimeoutError as error:
            raise NoAnswerError(f"no answer to {path} within {timeout_s:g} s") from error
        except URLError as error:
            raise NoAnswerError(_short(str(error.reason))) from error
        except (OSError, HTTPException) as error:
            raise NoAnswerError(_short(f"{type(error).__name__}: {error}")) from error
        try:
            return json.loads(content)
        except ValueError as error:
            raise NoAnswerError(f"{path} gives no JSON: {_short(content.decode(errors='replace'))}") from error


_PROBE_TOKEN = 40  # a letter in byte-level vocabularies, and in every vocabulary


def _base(argument: str) -> str:
    """The URL that all calls begin with. Raises: ConfigError if it is none."""
    url = argument.rstrip("/").removesuffix("/v1") + "/v1"
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets that do not close, a port that is no number or above 65535
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"engine openai: {argument!r} is no URL of a server", hint="openai:http://127.0.0.1:8000")
    return url


def _token_ids(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    found = choice.get("token_ids")
    return tuple(found) if isinstance(found, list) else None


def _logprobs(choice: Mapping[str, Any]) -> tuple[float, ...] | None:
    found = choice.get("logprobs")
    found = found.get("token_logprobs") if isinstance(found, dict) else None
    return tuple(found) if isinstance(found, list) else None


def _reason(error: HTTPError) -> str:
    return _short(f"{error}: {error.read().decode(errors='replace')}")


def _short(text: str) -> str:
    words = " ".join(text.split()) or "nothing"
    return words if len(words) <= _LONGEST_REASON else words[: _LONGEST_REASON - 1] + "…"


ENGINE = OpenAiServer
