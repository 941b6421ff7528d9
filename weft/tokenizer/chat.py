"""A conversation as the text of a prompt: messages checked, the template run by HuggingFace's library."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from weft.errors import RequestError, nearest

_PART_AS_TEXT = "{'type': 'text'"  # what a template makes of a part that it takes for a text

# Roles that every template may be given; others are known if the template names them.
ROLES = ("system", "developer", "user", "assistant", "tool")

# What a template's own variables cannot be called: arguments of `render`, and of HuggingFace's function.
RESERVED = frozenset(
    (
        *("inner", "messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


def render(
    inner: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    **variables: Any,
) -> str:
    """The text that `apply_chat_template` of this tokenizer gives.

    add_generation_prompt: end where the assistant is to speak; None does so unless the final message is continued.
    continue_final_message: end inside the final message, which the answer goes on with.
    chat_template: in place of the model's own.   variables: what else the template reads, `enable_thinking` for one.
    A content in parts is one text, a part a line, to a template that does not read parts, as in vLLM.
    Raises: RequestError for messages that are none, for a template that is missing or refuses them.
    """
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message=True goes on with a message, add_generation_prompt=True begins one",
            hint="leave out one of them",
        )
    template = chat_template if chat_template is not None else inner.chat_template
    if not template:
        raise RequestError(
            "the tokenizer has no chat template", hint="pass chat_template, or a prompt of text to generate"
        )
    named = template if isinstance(template, str) else "".join(template.values())  # several, by name
    check_messages(messages, named)

    def rendered(listed: list[dict[str, Any]]) -> str:
        text: str = inner.apply_chat_template(
            listed,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **variables,
        )
        return text

    # No parts are no text, and not "[]".
    listed = [{**message, "content": message["content"] or ""} for message in messages]
    try:
        with suppress(TypeError):  # a template that adds a text to a list
            text = rendered(listed)
            if _PART_AS_TEXT not in text:
                return text
        return rendered([{**message, "content": _one_text(message["content"])} for message in listed])
    except Exception as error:  # whatever a template raises, which is a program of somebody else's
        raise RequestError(
            f"the chat template refuses the conversation: {error}",
            hint="templates differ in the roles that they know, and in their order",
        ) from error


def check_messages(messages: object, template: str) -> None:
    """Raise RequestError, naming the place, unless this is a conversation that the template can be given."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"a conversation is a list of messages, got {messages!r}",
            hint='for instance [{"role": "user", "content": "hello"}]',
        )
    if not messages:
        raise RequestError("a conversation has at least one message, got none")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where} must be a mapping with role and content, got {message!r}")
        for name in ("role", "content"):
            if name not in message:
                raise RequestError(f"{where} has no {name}: {dict(message)!r}")
        if "tool_calls" in message:
            raise RequestError(f"{where} has tool_calls, and weft has no tools yet")
        role, content = message["role"], message["content"]
        quoted = (f"'{role}'", f'"{role}"')
        if role not in ROLES and not any(name in template for name in quoted):
            raise RequestError(f"{where} has the unknown role {role!r}", hint=nearest(str(role), ROLES))
        _check_content(f"{where} content", content)


def _one_text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _check_content(where: str, content: object) -> None:
    if isinstance(content, str):
        return
    if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a text, got {content!r}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where} must hold parts of text, got {part!r}", hint='{"type": "text", "text": ...}, and nothing else'
            )
