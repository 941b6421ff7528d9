"""Faults of attention in plain torch: masks, windows, groups of heads, where keys lie."""

from functools import partial

from weft.testing.planted.fault import Fault

_STORES = "tests/unit/attention/test_contiguous.py"
_BACKENDS = "tests/unit/attention/test_paged_backends.py"
_DECLARED = f"{_BACKENDS}::test_a_backend_does_what_its_layer_declares"
_SDPA = "tests/unit/attention/test_sdpa.py"
_sdpa = partial(Fault, file="weft/attention/sdpa.py", tier="tests/unit")
_ragged = partial(Fault, file="weft/attention/ragged.py", tier="tests/unit")
_rows = partial(Fault, file="weft/attention/contiguous.py", tier="tests/unit")
_blocks = partial(Fault, file="weft/attention/paged_gather.py", tier="tests/unit")
_kernels = partial(Fault, file="weft/attention/paged_triton.py", tier="tests/unit")
_state = partial(Fault, file="weft/inference/device_state.py", tier="tests/unit")
_STATE = "tests/unit/inference/test_device_state.py"

FAULTS = (
    _sdpa(
        name="a window shows one key more",
        old="keys > queries - window",
        new="keys >= queries - window",
        why="transformers#39408: one count includes the query, another does not.",
        killers=(f"{_SDPA}::test_a_window_of_four_counts_the_query_itself",),
    ),
    _sdpa(
        name="a query does not see itself",
        old="seen = keys <= queries",
        new="seen = keys < queries",
        why="The causal mask is strict.",
        killers=(f"{_SDPA}::test_visible_is_the_definition_or_what_torch_does_without_a_mask",),
    ),
    _sdpa(
        name="a chunk's queries stand at the first keys",
        old="torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]",
        new="torch.arange(num_queries, device=device)[:, None]",
        why="The mask of a chunk is aligned to the wrong corner.",
        killers=(f"{_SDPA}::test_visible_is_the_definition_or_what_torch_does_without_a_mask",),
    ),
    Fault(
        name="a layer may declare a window of no key",
        file="weft/attention/interface.py",
        tier="tests/unit",
        old="window=self.window)\n",
        new="window=self.window or None)\n",
        why="A query that sees nothing gives NaN in fixed order.",
        killers=("tests/unit/attention/test_packed.py::test_a_window_that_shows_no_key_is_no_attention[0]",),
    ),
    Fault(
        name="layers of different heads share a cache",
        file="weft/attention/interface.py",
        tier="tests/unit",
        old="if (spec.num_kv_heads, spec.head_dim) != (first.num_kv_heads, first.head_dim):",
        new="if spec.head_dim != first.head_dim:",
        why="The cache has the heads of the first layer, and writes to the others fail, or reach beside them.",
        killers=(f"{_BACKENDS}::test_layers_that_one_cache_cannot_hold_are_refused_by_number",),
    ),
    _sdpa(
        name="scores one percent too large",
        old="scale=spec.scale,",
        new="scale=spec.scale * 1.01,",
        why="Below what bfloat16 noise lets anybody see.",
        killers=(f"{_SDPA}::test_attend_equals_the_formula_in_float64",),
    ),
    _sdpa(
        name="query heads are dealt out to key heads by turns",
        old="keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)",
        new="keys, values = keys.repeat(1, repeats, 1, 1), values.repeat(1, repeats, 1, 1)",
        why="Head h reads key head h % H_kv instead of h // group, and only where there is a mask.",
        killers=(f"{_SDPA}::test_attend_equals_the_formula_in_float64",),
    ),
    _ragged(
        name="a window reads one key too few",
        old="max(0, self.start + 1 - window)",
        new="max(0, self.start + 2 - window)",
        why="The oldest key of the first query is left out.",
        killers=(f"{_STORES}::test_a_window_counts_the_query_itself_however_the_tokens_come",),
    ),
    _ragged(
        name="a window reads one key too many",
        old="max(0, self.start + 1 - window)",
        new="max(0, self.start - window)",
        why="What lies before a window may have been given away.",
        killers=(f"{_STORES}::test_a_step_reads_its_window_and_no_more",),
    ),
    _ragged(
        name="all layers take the mask of the first",
        old="            self._masks[window] = [built[shape] for shape in shapes]\n        return self._masks[window]",
        new="            self._masks[window] = [built[shape] for shape in shapes]\n"
        "        return next(iter(self._masks.values()))",
        why="Layers with and without a window alternate in some families.",
        killers=("tests/unit/models/test_families.py::test_logits_equal_huggingface_bit_for_bit",),
    ),
    _rows(
        name="every layer writes to the first",
        old="keys, values = self._slab[:, layer, row].unbind(0)  # each",
        new="keys, values = self._slab[:, 0, row].unbind(0)  # each",
        why="The last layer's keys stand in the place of all.",
        killers=(f"{_STORES}::test_a_step_writes_its_own_tokens_of_its_own_layer_and_nothing_else",),
    ),
    _rows(
        name="a copied row has no values",
        old="self.slab[:, :, target] = self.slab[:, :, source]",
        new="self.slab[0, :, target] = self.slab[0, :, source]",
        why="Keys alone are copied.",
        killers=(f"{_STORES}::test_copied_blocks_are_equal_in_every_layer_and_leave_the_rest",),
    ),
    _blocks(
        name="keys and values change places on their way out",
        old="for part in (0, 1))\n",
        new="for part in (1, 0))\n",
        why="Two tensors of one shape are easily mixed up.",
        killers=(f"{_DECLARED}[gather]",),
    ),
    _blocks(
        name="a window ignores how far it begins into a block",
        old="pieces[-1] += oldest - first * size\n            pieces += [span.end - oldest, last * size - span.end]",
        new="pieces += [span.end - oldest, last * size - span.end + oldest - first * size]",
        why="Keys are read from the start of the block.",
        killers=(f"{_DECLARED}[gather-window]",),
    ),
    _blocks(
        name="a copied block goes the wrong way",
        old="self.pool[:, :, targets] = self.pool[:, :, sources]",
        new="self.pool[:, :, sources] = self.pool[:, :, targets]",
        why="What others read is overwritten by what nobody wrote.",
        killers=(f"{_BACKENDS}::test_copied_blocks_are_whole_and_leave_the_rest",),
    ),
    _kernels(
        name="kernels are not told of the soft cap",
        old="window=spec.window, soft_cap=spec.soft_cap)",
        new="window=spec.window, soft_cap=None)",
        why="vllm-metal#665: the call passes a constant where the config has a value.",
        killers=(f"{_DECLARED}[triton-soft-cap]",),
    ),
    _kernels(
        name="kernels are not told of the window",
        old="window=spec.window, soft_cap=spec.soft_cap)",
        new="window=None, soft_cap=spec.soft_cap)",
        why="The same for the window.",
        killers=(f"{_DECLARED}[triton-window]",),
    ),
    _kernels(
        name="keys are normed by the queries' weights",
        old="key_norm=None if key_norm is None else key_norm.weight,",
        new="key_norm=None if query_norm is None else query_norm.weight,",
        why="Qwen3 has a norm for each.",
        killers=(f"{_DECLARED}[triton]",),
    ),
    _state(
        name="a slot lies in the block before",
        old="blocks * self._block_size + positions % self._block_size",
        new="blocks * self._block_size + (positions - 1) % self._block_size",
        why="Off by one at the edges of blocks.",
        killers=(f"{_STATE}::test_a_batch_is_what_rows_in_plain_python_say",),
    ),
    _state(
        name="positions begin anew in every chunk",
        old="positions = computed[owner] + offsets",
        new="positions = offsets",
        why="nano-vllm#212: a chunk is not told what came before it, nor a prompt with a cached beginning.",
        killers=(f"{_STATE}::test_a_batch_is_what_rows_in_plain_python_say",),
    ),
    _state(
        name="a step samples from the first of its rows",
        old="return [index for end, count in ends for index in range(end - count, end)]",
        new="return [index - end + count for end, count in ends for index in range(end - count, end)]",
        why="The logits of another token are sampled from.",
        killers=(f"{_STATE}::test_a_batch_is_what_rows_in_plain_python_say",),
    ),
    _state(
        name="a sampled token stands one place too early",
        old="places = lengths[columns].clamp(max=self.token_ids.shape[1] - 1)",
        new="places = (lengths[columns] - 1).clamp(max=self.token_ids.shape[1] - 1)",
        why="It overwrites the token that it follows.",
        killers=(f"{_STATE}::test_a_step_takes_the_tokens_that_the_step_before_sampled",),
    ),
    _blocks(
        name="equivalent: blocks counted up in another way",
        old="first, last = oldest // size, -(-span.end // size)",
        new="first, last = oldest // size, (span.end + size - 1) // size",
        why="The same number.",
        killers=(f"{_DECLARED}[gather]", f"{_DECLARED}[gather-window]"),
        expect="survives",
    ),
)
