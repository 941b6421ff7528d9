"""Faults of stop strings, detokenising and what a caller is given."""

from functools import partial

from weft.testing.planted.fault import Fault

_STOPS = "tests/unit/test_stop_strings.py"
_DETOKENIZER = "tests/unit/test_detokenizer.py"
_OUTPUTS = "tests/unit/test_output_processor.py"
_fault = partial(Fault, tier="tests/unit")
_stops = partial(_fault, file="weft/stop_strings.py")
_detokenizer = partial(_fault, file="weft/tokenizer/detokenizer.py")
_pieces = partial(_fault, file="weft/tokenizer/pieces.py")
_outputs = partial(_fault, file="weft/output_processor.py")
_engine = partial(_fault, file="weft/inference/engine.py")

STOPS = (
    _stops(
        name="nothing is held back",
        old="shown = len(text) - state.num_held\n",
        new="shown = len(text)\n",
        why="vllm#3574: parts of a stop string are shown before it completes.",
        killers=(f"{_STOPS}::test_no_part_of_a_stop_string_is_shown_before_it_completes",),
    ),
    _stops(
        name="a match does not cross pieces",
        old="        state, root = self._state, self._root\n",
        new="        state, root = self._root, self._root\n",
        why="A stop string is found only within one token.",
        killers=(f"{_STOPS}::test_any_text_in_any_pieces_ends_where_the_whole_text_does",),
    ),
    _stops(
        name="a beginning that fails is not a second chance",
        old="            while (following := state.after.get(character)) is None and state.fallback is not None:\n"
        "                state = state.fallback\n            state = root if following is None else following\n",
        new="            following = state.after.get(character) or root.after.get(character)\n"
        "            state = root if following is None else following\n",
        why="'aab' is not found in 'aaab'.",
        killers=(f"{_STOPS}::test_any_text_in_any_pieces_ends_where_the_whole_text_does",),
    ),
    _stops(
        name="a stop string within another is passed over",
        old="            state.stop = state.stop or shorter.stop\n",
        new="",
        why="What completes first ends the text.",
        killers=(f"{_STOPS}::test_the_first_to_complete_wins_then_the_longest",),
    ),
    _stops(
        name="more is held back than could still match",
        old="state.num_held = depth if state.after else shorter.num_held",
        new="state.num_held = depth",
        why="A stream comes later than it could.",
        killers=(f"{_STOPS}::test_held_back_is_what_could_still_become_a_match_and_no_more",),
    ),
    _stops(
        name="the text after a match goes on",
        old='        if self.match is not None:\n            return ""\n',
        new="",
        why="What the engine sampled beyond is shown.",
        killers=(f"{_STOPS}::test_nothing_comes_after_a_match",),
    ),
    _stops(
        name="what was held back is lost at the end",
        old='        text, self._held = self._held, ""\n        return text\n',
        new='        self._held = ""\n        return ""\n',
        why="An answer that ends like a stop string is cut short.",
        killers=(f"{_STOPS}::test_any_text_in_any_pieces_ends_where_the_whole_text_does",),
    ),
    _outputs(
        name="min_tokens lets a stop string end one early",
        old="may_stop=self._num_tokens > self._min_tokens)",
        new="may_stop=self._num_tokens >= self._min_tokens)",
        why="vllm#46243: a stop string is not one of the tokens.",
        killers=(f"{_OUTPUTS}::test_text_tokens_and_logprobs_end_together_streamed_or_whole",),
    ),
    _outputs(
        name="a stop token is shown",
        old="is_hidden = place == last and step.stop_reason is not None and not self._shows_stop",
        new="is_hidden = False",
        why="Text ends before the token that ended it.",
        killers=(f"{_OUTPUTS}::test_token_ids_hold_the_stop_token_and_text_does_not",),
    ),
    _outputs(
        name="tokens after a stop string are kept",
        old="not is_hidden and self._show(self._detokenizer.push(token)):\n                return\n",
        new="not is_hidden:\n                self._show(self._detokenizer.push(token))\n",
        why="Tokens, logprobs and text do not end together.",
        killers=(f"{_OUTPUTS}::test_text_tokens_and_logprobs_end_together_streamed_or_whole",),
    ),
    _outputs(
        name="the engine is not told of a stop string",
        old='            if not step.finished:\n                self._finish(step.request_id, "stop")\n',
        new="",
        why="It samples on to max_tokens.",
        killers=("tests/unit/test_text_engine.py::test_a_stop_string_ends_tokens_and_text_streamed_or_whole",),
    ),
    _fault(
        name="ignore_eos is ignored",
        file="weft/inference/input_processor.py",
        old="eos = () if params.ignore_eos else self._eos_token_ids",
        new="eos = self._eos_token_ids",
        why="A benchmark measures shorter answers than it asked for.",
        killers=("tests/unit/inference/test_engine.py::test_what_ends_a_request",),
    ),
    _fault(
        name="one of the model's EOS ids is read",
        file="weft/models/checkpoint/interface.py",
        old="return cls(eos_token_ids=tuple(ids), options=generation or {})",
        new="return cls(eos_token_ids=tuple(ids[:1]), options=generation or {})",
        why="vllm#4180: a chat model runs on past the end of its turn.",
        killers=("tests/unit/models/test_checkpoint_safetensors.py::test_every_id_that_ends_a_sequence_is_read",),
    ),
)

DETOKENISING = (
    _detokenizer(
        name="the text of the window is given out again when it is cut",
        old="self._window, self._shown = tail, len(self._decode(tail)) - num_held",
        new="self._window, self._shown = tail, 0",
        why="sglang#31598: what was sent is counted backwards.",
        killers=(f"{_DETOKENIZER}::test_the_pieces_joined_are_the_text_decoded_at_once",),
    ),
    _detokenizer(
        name="a prompt's open character is forgotten",
        old="        self._characters.push(tail[-_OPEN_BYTES:])\n",
        new="",
        why="vllm#48853: the answer ends a character that the prompt began.",
        killers=(f"{_DETOKENIZER}::test_a_prompt_that_ends_inside_a_character_is_not_given_out_again",),
    ),
    _detokenizer(
        name="a truncated character is lost",
        old='return "" if self._is_empty else self._characters.finish()',
        new='return ""',
        why="What the tokenizer shows as U+FFFD is not shown.",
        killers=(f"{_DETOKENIZER}::test_a_run_of_bytes_shows_as_the_tokenizer_shows_it",),
    ),
    _detokenizer(
        name="an open character is shown at once",
        old="return min(len(text) - len(text.rstrip(_REPLACEMENT)), _OPEN_BYTES)",
        new="return 0",
        why="A stream shows U+FFFD and then the character.",
        killers=(f"{_DETOKENIZER}::test_a_character_is_open_where_the_window_fills_up",),
    ),
    _detokenizer(
        name="a window begins at the answer",
        old="        self._open_window(prompt_token_ids)\n",
        new="        self._open_window([])\n",
        why="tgi#1024: the space before the first word is lost.",
        killers=(f"{_DETOKENIZER}::test_the_space_before_a_word_is_kept_wherever_the_answer_begins",),
    ),
    _detokenizer(
        name="the window grows for ever",
        old="        if len(self._window) >= self._longest:\n",
        new="        if False:\n",
        why="A token costs more the longer the answer is.",
        killers=(f"{_DETOKENIZER}::test_a_token_costs_the_same_however_long_the_answer",),
    ),
    _detokenizer(
        name="bytes are given one at a time",
        old='        if self._pieces.fallback_byte(token_id):\n            return ""\n',
        new="",
        why="A run of bytes is decoded as a whole.",
        killers=(f"{_DETOKENIZER}::test_the_pieces_joined_are_the_text_decoded_at_once[byte fallback]",),
    ),
    _pieces(
        name="a byte of the alphabet stands for itself",
        old="known = piece.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)",
        new="known = piece.encode()",
        why="A space is shown as a letter with a dot.",
        killers=(f"{_DETOKENIZER}::test_bytes_of_a_token_are_those_of_the_library",),
    ),
    _fault(
        name="a conversation begins twice",
        file="weft/llm.py",
        old="return rendered, tokenizer.encode(rendered, add_special_tokens=False)",
        new="return rendered, tokenizer.encode(rendered)",
        why="vllm#4688: the template writes a BOS, and the tokenizer one more.",
        killers=("tests/unit/test_chat.py::test_a_conversation_has_one_bos_and_is_answered_as_its_tokens_are",),
    ),
    _fault(
        name="half of a surrogate pair is let through",
        file="weft/tokenizer/hub.py",
        old="        try:\n            text.encode()\n",
        new='        try:\n            text.encode(errors="surrogatepass")\n',
        why="tiktoken#82: an internal error instead of a refusal.",
        killers=("tests/unit/test_tokenizer.py::test_half_of_a_surrogate_pair_is_refused",),
    ),
    _fault(
        name="an engine is stepped although somebody else drives it too",
        file="weft/text_engine.py",
        old="is_alone = self.engine.num_calls == self._num_calls",
        new="is_alone = True",
        why="Each is given what the other's requests gained, and loses it.",
        killers=("tests/unit/test_text_engine.py::test_a_step_that_would_lose_tokens_is_not_taken",),
    ),
    _fault(
        name="prompts are queued beyond what may wait",
        file="weft/llm.py",
        old="while left and text.has_room_for(left[0].token_ids):",
        new="while left:",
        why="A long list of prompts is refused whole, with a hint made for servers.",
        killers=("tests/unit/test_llm_queue.py::test_no_more_wait_than_may",),
    ),
    _fault(
        name="prompts overtake answers that wait for room",
        file="weft/text_engine.py",
        old="return not self._due and self.engine.has_room_for(",
        new="return self.engine.has_room_for(",
        why="The other answers to a prompt wait until the whole list has come in.",
        killers=(
            "tests/unit/test_llm_queue.py::"
            "test_answers_that_wait_for_room_are_not_overtaken_by_prompts_that_would_find_some",
        ),
    ),
    _engine(
        name="a step by hand is not counted",
        old="        self._num_calls += 1\n        return self._pipeline.step()\n",
        new="        return self._pipeline.step()\n",
        why="A stream goes on without the tokens that somebody else was given.",
        killers=("tests/unit/test_text_engine.py::test_a_step_that_would_lose_tokens_is_not_taken",),
    ),
    _fault(
        name="likeliest tokens are ranked by place where they are as likely",
        file="weft/outputs.py",
        old="        if logprob < last:\n            better, last = count, logprob\n",
        new="        better = count\n",
        why="As likely ones do not count as better.",
        killers=(f"{_OUTPUTS}::test_logprobs_name_the_token_itself_first_and_each_by_rank",),
    ),
)
