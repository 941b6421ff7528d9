"""Faults of what is left to the pool beside weights, state and steps: too much of it ends in an error under load."""

from functools import partial

from weft.testing.planted.fault import Fault

_BUILDING = "tests/unit/inference/test_engine_building.py"
_POOL = f"{_BUILDING}::test_the_pool_takes_what_weights_and_state_leave_and_no_more"
_STEPS = f"{_BUILDING}::test_what_steps_take_is_left_out_of_the_pool"
_TRIAL = f"{_BUILDING}::test_a_trial_with_the_graphs_that_will_run_is_made_for_a_gpu_alone"
_memory = partial(Fault, file="weft/inference/pool_memory.py", tier="tests/unit")
_startup = partial(Fault, file="weft/inference/startup.py", tier="tests/unit")

FAULTS = (
    _memory(
        name="the scratch block is not counted",
        old=" // bytes_per_block - 1  #",
        new=" // bytes_per_block  #",
        why="The pool holds one block more than it was given room for.",
        killers=(_POOL,),
    ),
    _memory(
        name="the pool takes all there is",
        old="(there - weight_bytes) * self._config.gpu_memory_utilization)",
        new="(there - weight_bytes) * 1.0)",
        why="What was left to others is taken.",
        killers=(_POOL,),
    ),
    _memory(
        name="weights that are still to be read take no room",
        old="        budget = int((there - weight_bytes) *",
        new="        budget = int(there *",
        why="They come after the pool, and find it full.",
        killers=(_POOL,),
    ),
    _startup(
        name="the pool takes what steps need",
        old="memory.fit(wanted, bytes_per_block, state_bytes + workspace_bytes,",
        new="memory.fit(wanted, bytes_per_block, state_bytes,",
        why="Out of memory at the first large step.",
        killers=(_STEPS,),
    ),
    _startup(
        name="a trial captures graphs that nobody will run",
        old="with_graphs=not execution.enforce_eager)",
        new="with_graphs=True)",
        why="An eager engine leaves room for graphs.",
        killers=(_TRIAL,),
    ),
    _startup(
        name="what a trial took stays taken",
        old="    torch.cuda.empty_cache()\n",
        new="",
        why="The pool finds less than is free.",
        killers=(_TRIAL,),
    ),
    _startup(
        name="options are not looked at before the tokenizer is read",
        old="    return _choose(config, checkpoint).geometry\n",
        new="    return BlockGeometry(num_blocks=1, block_size=1, shareable=True)\n",
        why="A backend that cannot run is told after seconds, or behind an error of the tokenizer.",
        killers=(
            "tests/unit/test_llm.py::test_what_cannot_run_here_is_refused_before_the_tokenizer_is_read"
            "[options6-block_size=16 says nothing to the contiguous backend]",
        ),
    ),
    Fault(
        name="a mistyped option waits for a download",
        file="weft/llm.py",
        tier="tests/unit",
        old="        check_options(config)  # before anything is looked for, or fetched\n",
        new="",
        why="Minutes pass before the name of a policy turns out to be none.",
        killers=(
            "tests/unit/inference/test_refusals_at_start.py::"
            "test_what_no_model_could_make_right_is_refused_before_a_checkpoint_is_looked_for"
            "[options0-unknown policy='fcf'-did you mean 'fcfs'?]",
        ),
    ),
)
