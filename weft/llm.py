"""The offline face: prompts in, texts out, in the order given, whole or as they come.

llm = weft.LLM("smollm2-135m")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
for output in llm.stream_chat([{"role": "user", "content": "Who are you?"}], SamplingParams(max_tokens=100)):
    print(output.outputs[0].text, end="", flush=True)
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, cast

from tqdm import tqdm

from weft.config import EngineConfig
from weft.errors import InvalidPromptsError, RequestError, SamplingParamsError, nearest, shown
from weft.inference.engine import Engine
from weft.inference.input_processor import as_token_ids
from weft.inference.sampling_params import SamplingParams
from weft.inference.startup import check, check_options
from weft.model_defaults import default_params
from weft.models.checkpoint.source import open_checkpoint
from weft.options import strict_call
from weft.outputs import RequestOutput
from weft.text_engine import TextEngine
from weft.tokenizer.chat import RESERVED
from weft.tokenizer.hub import HubTokenizer

# A text, token ids, or a mapping with one of the two under `prompt` or `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]
# Messages, each with `role` and `content`.
Conversation = Sequence[Mapping[str, Any]]


class _Encoded(NamedTuple):
    text: str | None
    token_ids: list[int]
    params: SamplingParams


class LLM:
    """A model, ready to generate.

    LLM("smollm2-135m")                                          the model that comes with weft's default groups
    LLM("path/to/folder", dtype="bf16", device="cuda")           a local folder
    LLM("org/name", revision="main", max_num_seqs=32)            the hub, or its cache when offline

    Options are the fields of `weft.config`, by name. engine: for those who drive the loop themselves.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Raises: ConfigError (unknown or contradictory options), CheckpointError (the model cannot be loaded)."""
        config = EngineConfig.of(model=model, **options)
        check_options(config)  # before anything is looked for, or fetched
        checkpoint = open_checkpoint(
            config.model.model, revision=config.model.revision, load_format=config.model.load_format
        )
        check(config, checkpoint)  # before the tokenizer, which takes seconds and has errors of its own
        location = checkpoint.tokenizer
        self.tokenizer = None if config.model.skip_tokenizer_init else HubTokenizer(location.folder, location.gguf_file)
        self.engine = Engine(config, checkpoint, show_progress=True)
        self._generation_options = checkpoint.generation.options
        self._ids = count()
        self._calls: dict[object, None] = {}  # under way, in the order in which they came; only the first is served
        self._text: TextEngine | None = None  # of the last call, until all that it has queued has ended

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors set in `generation_config.json`.

        Raises: ConfigError if they set a field that weft does not take, since dropping it would change the output.
        """
        return default_params(self._generation_options, self.engine.limits.max_model_len, self.engine.vocab_size)

    @strict_call
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order. A list of integers is one prompt; no prompts give no outputs.

        sampling_params: one for all, or one for each; None takes the model's own defaults.
        Raises: RequestError and its kinds before any work is done: every prompt is checked first, one bad prompt
            raises its own error with its index, several raise InvalidPromptsError with all of them.
        """
        _check_switch("use_tqdm", use_tqdm)
        listed = cast("list[Prompt]", [prompts] if _is_one(prompts) else list(prompts))
        encoded = self._encode_all(listed, self._params_for(len(listed), sampling_params))
        return self._run(encoded, use_tqdm=use_tqdm)

    @strict_call
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: object = None,
    ) -> list[RequestOutput]:
        """The assistant's answer to a conversation, or to each of several; the prompt is what the template makes of it.

        add_generation_prompt: end where the assistant is to speak; None does so unless the final message is continued.
        continue_final_message: the answer goes on with the final message, which the assistant has begun.
        chat_template: in place of the model's own.   chat_template_kwargs: what else it reads.
        Raises: as `generate`; tools are refused.
        """
        _check_switch("use_tqdm", use_tqdm)
        one = not isinstance(messages, Sequence) or not messages or isinstance(messages[0], Mapping)
        conversations = cast("list[Conversation]", [messages] if one or isinstance(messages, str) else list(messages))
        options = _chat_options(
            add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools
        )
        prompts = [_Chat(conversation, options) for conversation in conversations]
        encoded = self._encode_all(prompts, self._params_for(len(prompts), sampling_params))
        return self._run(encoded, use_tqdm=use_tqdm)

    @strict_call
    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """What the answers to one prompt gain, step by step: the texts of an answer joined are its whole text.

        Whoever leaves off before the end aborts the request. The prompt is checked at the call, not at the first step.
        Raises: as `generate`.
        """
        return self._stream(prompt, sampling_params)

    @strict_call
    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: object = None,
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation; arguments as of `chat`."""
        options = _chat_options(
            add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs, tools
        )
        return self._stream(_Chat(messages, options), sampling_params)

    def _stream(self, prompt: "Prompt | _Chat", given: SamplingParams | None) -> Iterator[RequestOutput]:
        if given is not None and not isinstance(given, SamplingParams):
            raise SamplingParamsError(f"sampling_params must be SamplingParams, got {shown(given)}")
        (encoded,) = self._encode_all([prompt], self._params_for(1, given))
        self._check_free()
        return self._outputs([encoded], streams=True)

    def _run(self, encoded: Sequence[_Encoded], *, use_tqdm: bool) -> list[RequestOutput]:
        finished = {}
        with tqdm(total=len(encoded), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            for output in self._outputs(encoded, streams=False):
                finished[int(output.request_id)] = output
                bar.update()
        return [finished[request_id] for request_id in sorted(finished)]

    def _outputs(self, encoded: Sequence[_Encoded], *, streams: bool) -> Iterator[RequestOutput]:
        me = object()
        try:
            self._calls[me] = None
            self._sweep(me)
            # Again: between the call and the first step of a stream others may have come, or at once in other threads.
            self._check_free(me)
            self._text = text = TextEngine(self.engine, self.tokenizer)
            left = deque(encoded)
            while left or text.has_unfinished_requests():
                while left and text.has_room_for(left[0].token_ids):
                    prompt, token_ids, params = left.popleft()
                    text.add_request(str(next(self._ids)), prompt, token_ids, params, streams=streams)
                assert text.has_unfinished_requests(), "a prompt that passed finds no room in an empty queue"
                yield from text.step()
        finally:  # interrupted, failed or left: the engine is left as it was found
            try:
                self._sweep(me)
            finally:
                self._calls.pop(me, None)  # one instruction, so that no second interrupt leaves the door locked

    def _sweep(self, me: object) -> None:
        """End what a call has left; at the next one, where an interrupt came in between."""
        if self._text is not None and list(self._calls)[:1] == [me]:
            for request_id in self._text.open_requests:
                self._text.abort(request_id)
            self._text = None

    def _check_free(self, me: object = None) -> None:
        """me: a call that is among those under way already."""
        is_swept = self._text is None  # what is not will be ended by whoever calls next
        if list(self._calls)[:1] not in ([], [me]) or (is_swept and self.engine.has_unfinished_requests()):
            raise RequestError(
                "the engine holds requests that were added by hand, or of a stream that has not ended, or of a call in "
                "another thread",
                hint="finish them with engine.step(), close the stream, or wait for the call, before the next one",
            )

    def _params_for(
        self, num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * num_prompts
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not isinstance(given, Sequence):
            raise SamplingParamsError(f"sampling_params must be SamplingParams or a list of them, got {shown(given)}")
        params = list(given)
        for place, param in enumerate(params):
            if not isinstance(param, SamplingParams):
                raise SamplingParamsError(f"sampling_params[{place}] must be SamplingParams, got {shown(param)}")
        if len(params) != num_prompts:
            raise SamplingParamsError(f"{num_prompts} prompts but {len(params)} sampling_params")
        return params

    def _encode_all(self, prompts: "Sequence[Prompt | _Chat]", params: Sequence[SamplingParams]) -> list[_Encoded]:
        """Text and token ids of each prompt, all of them checked."""
        text, encoded, errors = TextEngine(self.engine, self.tokenizer), [], {}
        for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                shown, token_ids = self._encode(prompt)
                text.validate(token_ids, param)
                encoded.append(_Encoded(shown, token_ids, param))
            except RequestError as error:
                errors[place] = error.at(place)
        if len(errors) == 1:
            raise next(iter(errors.values()))
        if errors:
            raise InvalidPromptsError(errors)
        return encoded

    def _encode(self, prompt: "Prompt | _Chat") -> tuple[str | None, list[int]]:
        if isinstance(prompt, _Chat):
            tokenizer = self._tokenizer_for("a conversation")
            rendered = tokenizer.chat(prompt.messages, **prompt.options)
            return rendered, tokenizer.encode(rendered, add_special_tokens=False)  # the template writes its own
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                unknown = next((key for key in prompt if key not in ("prompt", "prompt_token_ids")), None)
                hint = nearest(str(unknown), ("prompt", "prompt_token_ids")) if unknown is not None else None
                raise RequestError(
                    f"a prompt mapping has one key, prompt or prompt_token_ids: {shown(prompt)}", hint=hint
                )
            ((key, value),) = prompt.items()
            if isinstance(value, Mapping) or isinstance(value, str) != (key == "prompt"):
                raise RequestError(f"prompt holds a text, prompt_token_ids a list of token ids: {shown(prompt)}")
            return self._encode(value)
        if isinstance(prompt, str):
            return prompt, self._tokenizer_for(f"a text prompt, {prompt!r},").encode(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text, a list of token ids or a mapping, got {shown(prompt)}")
        return None, as_token_ids(prompt)

    def _tokenizer_for(self, what: str) -> HubTokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and skip_tokenizer_init=True leaves none", hint="give token ids"
            )
        return self.tokenizer


class _Chat(NamedTuple):
    """A conversation in the place of a prompt."""

    messages: Conversation
    options: dict[str, Any]


def _chat_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template: str | None,
    variables: Mapping[str, Any] | None,
    tools: object,
) -> dict[str, Any]:
    for name, value in (
        ("add_generation_prompt", False if add_generation_prompt is None else add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        _check_switch(name, value)
    if tools is not None:
        raise RequestError(f"weft has no tool calls yet, got tools={shown(tools)}", hint="describe them in a message")
    if chat_template is not None and not isinstance(chat_template, str):
        raise RequestError(f"chat_template must be a text or None, got {shown(chat_template)}")
    if variables is not None and not isinstance(variables, Mapping):
        raise RequestError(f"chat_template_kwargs must be a mapping from names to values, got {shown(variables)}")
    for name in variables or ():
        if not isinstance(name, str) or name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs holds {shown(name)}, which is no variable of a template's own",
                hint="what is said, and how the prompt ends, have arguments of their own",
            )
    return {
        **(variables or {}),
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template": chat_template,
    }


def _check_switch(name: str, value: object) -> None:
    """What is neither would count as True, "no" among it."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, got {shown(value)}")


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: a text, a mapping, or a list that begins with a token id."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return True
    if not len(prompts):
        return False
    # Arrays have `__index__` too, and one of a single token would pass for a token.
    return hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0
