"""Any server that speaks OpenAI's completions API, by its URL: `openai:http://127.0.0.1:8000`.

What the server can do is asked of it when it is opened, one thing a request: token ids as prompts and answers,
logprobs, stop ids, seeds. What it refuses it lacks, in its own words.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from weft.errors import ConfigError
from weft.testing.engines.interface import Ability, Answer, Job, ModelUnderTest

_TIMEOUT_S = 600.0
_LONGEST_REASON = 160


class OpenAiServer:
    """Requests of one call are sent at the same time, each on a connection of its own."""

    def __init__(self, model: ModelUnderTest, argument: str | None = None) -> None:
        """Raises: ConfigError if there is no URL, nobody answers, or the plainest request is refused."""
        if not argument:
            raise ConfigError("engine openai needs the server's URL", hint="openai:http://127.0.0.1:8000")
        self._url = argument.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = self._served(model)
        self._threads = ThreadPoolExecutor(model.max_num_seqs)
        self.lacks: dict[Ability, str] = {"logits": "the API has none"}
        if not model.dtype_is_given:
            self.lacks["dtype"] = "the server chose it; name it (--dtype) if it is known"
        self._probe(model)
        self.description = f"server at {self._url}, model {self._model!r}"

    def answer(self, jobs: Sequence[Job]) -> list[Answer]:
        """Raises: RuntimeError if the server refuses a request."""
        return list(self._threads.map(self._answer, jobs))

    def close(self) -> None:
        self._threads.shutdown()

    def _served(self, model: ModelUnderTest) -> str:
        """The name to ask for: the only one that the server lists, else the checkpoint's path."""
        try:
            listed = [entry["id"] for entry in self._call("/models", None)["data"]]
        except HTTPError:
            return model.path  # it answers, but lists nothing: transformers 5.17 without a hub cache does so
        except (URLError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"no OpenAI-compatible server answers at {self._url}: {error}") from error
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
            self._call("/completions", plain)
        except HTTPError:
            try:  # a server without a tokenizer takes no text
                plain = {**plain, "prompt": [_PROBE_TOKEN]}
                self._call("/completions", plain)
            except (HTTPError, URLError) as error:
                raise ConfigError(f"the server at {self._url} refuses a plain completion: {_reason(error)}") from error
        except URLError as error:
            raise ConfigError(f"the server at {self._url} does not answer: {error}") from error
        for ability, question in questions.items():
            try:
                choice = self._call("/completions", {**plain, **question})["choices"][0]
            except HTTPError as error:
                self.lacks[ability] = f"the server says {_reason(error)}"
                continue
            if ability == "token_ids" and not choice.get("token_ids"):
                self.lacks[ability] = "the server takes return_token_ids and gives none"
            if ability == "logprobs" and not (choice.get("logprobs") or {}).get("token_logprobs"):
                self.lacks[ability] = "the server takes logprobs and gives none"

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
            said = self._call("/completions", body)
        except HTTPError as error:
            raise RuntimeError(f"the server refuses a request: {_reason(error)}") from error
        choice = said["choices"][0]
        return Answer(
            token_ids=None if "token_ids" in self.lacks else tuple(choice["token_ids"]),
            text=choice["text"],
            num_tokens=(said.get("usage") or {}).get("completion_tokens"),
            finish_reason=choice["finish_reason"],
            logprobs=None if "logprobs" in self.lacks else tuple(choice["logprobs"]["token_logprobs"]),
        )

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return json.load(response)


_PROBE_TOKEN = 40  # a letter in byte-level vocabularies, and in every vocabulary


def _reason(error: Exception) -> str:
    text = error.read().decode(errors="replace") if isinstance(error, HTTPError) else ""
    words = " ".join(f"{error}: {text}".split())
    return words if len(words) <= _LONGEST_REASON else words[: _LONGEST_REASON - 1] + "…"


ENGINE = OpenAiServer
