"""The pytest plugin: cheap to have installed, and honest about what it skips."""

import subprocess
import sys

import pytest

from weft.testing import bitwise, exactness, near_ties

pytest_plugins = ["pytester"]

# A run in this process forgets at its end what it was the first to import: whoever imports that later has classes that
# are called like those others hold and are not theirs.
_KEPT = (bitwise, exactness, near_ties)

GPU_TEST = """
    import pytest

    @pytest.mark.gpu
    def test_needs_a_gpu(): ...

    def test_needs_none(): ...
"""


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_importing_the_plugin_imports_neither_torch_nor_weft() -> None:
    code = "import pytest_weft, sys; print(sorted({'torch', 'weft', 'numpy', 'transformers'} & {*sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_run_without_gpu_tests_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_nothing(): assert not {'torch', 'weft'} & {*sys.modules}")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)


@pytest.mark.usefixtures("without_gpu")
def test_gpu_tests_are_skipped_with_the_reason_where_there_is_no_gpu(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GPU_TEST)
    result = pytester.runpytest("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*needs a CUDA device, and torch sees none"])


@pytest.mark.usefixtures("without_gpu")
def test_require_gpu_is_an_error_where_a_gpu_test_would_be_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GPU_TEST)
    result = pytester.runpytest("--require-gpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require-gpu, and torch sees no GPU for 1 tests"])


@pytest.mark.usefixtures("without_gpu")
def test_require_gpu_asks_for_nothing_where_no_test_needs_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_needs_none(): ...")
    pytester.runpytest("--require-gpu").assert_outcomes(passed=1)


def test_gpu_tests_run_where_there_is_one(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    pytester.makepyfile(GPU_TEST)
    pytester.runpytest("--require-gpu").assert_outcomes(passed=2)


@pytest.mark.usefixtures("without_gpu")
def test_every_marker_is_registered(pytester: pytest.Pytester) -> None:
    names = ("gpu", "perf", "slow", "engine")
    pytester.makepyfile("import pytest\n" + "\n".join(f"@pytest.mark.{name}\ndef test_{name}(): ..." for name in names))
    pytester.runpytest("--strict-markers").assert_outcomes(passed=3, skipped=1)


def test_the_tiers_are_fixtures_and_keep_count_of_excuses(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        from weft.testing import Continuation

        def said(*tokens, margin):
            logits = torch.nn.functional.one_hot(torch.tensor(tokens), 8).float() * margin
            return Continuation(prompt_token_ids=(0,), token_ids=tokens, logits=logits, finish_reason="length")

        def test_tiers(assert_token_exact, assert_bitwise, audit_near_ties):
            reference = said(1, 2, 3, margin=1e-5)
            tie = Continuation(**{**vars(reference), "token_ids": (1, 4, 3)})
            assert_token_exact([reference] * 2, [reference, tie], noise=lambda of: 1e-5)
            assert_token_exact([reference], [reference])
            assert_bitwise([reference.logits], [reference.logits.clone()])
            audit_near_ties([reference.logits], [reference.logits], [reference.logits], dtype=torch.bfloat16)
        """
    )
    result = pytester.runpytest("--junitxml=out.xml")
    result.assert_outcomes(passed=1)
    text = (pytester.path / "out.xml").read_text()
    counts = {"positions": 12, "ties": 1, "values": 24, "excused_flips": 0, "unexcused_flips": 0}
    assert all(f'<property name="weft_{name}" value="{count}"' in text for name, count in counts.items())


def test_a_tier_that_fails_is_a_failure_and_its_counts_are_kept(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch

        def test_bits(assert_bitwise):
            assert_bitwise([torch.ones(2)], [torch.zeros(2)])
        """
    )
    result = pytester.runpytest("--junitxml=out.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*not bitwise equal*", "*2 of 2 values differ*"])
    assert '<property name="weft_values" value="2"' in (pytester.path / "out.xml").read_text()


def test_what_another_project_calls_nightly_or_engine_name_is_its_own(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers = nightly: of this project")
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def engine_name(): return "sqlite"

        @pytest.mark.nightly
        def test_at_night(engine_name): assert engine_name == "sqlite"
        """
    )
    pytester.runpytest("--strict-markers").assert_outcomes(passed=1)


ENGINE_TESTS = """
    import pytest

    @pytest.mark.engine
    def test_law(engine_name): assert engine_name

    def test_of_something_else(): ...
"""


@pytest.mark.parametrize(
    ("arguments", "passed", "deselected"),
    [([], 4, 0), (["--engine", "vllm"], 1, 1), (["--engine", "./mine.py", "--engine", "hf"], 2, 1)],
    ids=str,
)
def test_where_an_engine_is_named_what_judges_engines_runs_for_it_alone(
    pytester: pytest.Pytester, arguments: list[str], passed: int, deselected: int
) -> None:
    pytester.makepyfile(ENGINE_TESTS, mine="")
    pytester.runpytest("--strict-markers", *arguments).assert_outcomes(passed=passed, deselected=deselected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vlm", "ERROR: --engine: unknown engine 'vlm'\nhint: did you mean 'vllm'*"),
        ("", "ERROR: --engine: unknown engine ''\nhint: known names: hf, *"),
        ("./absent.py", "ERROR: --engine: there is no engine file ./absent.py"),
    ],
)
def test_an_engine_that_is_none_is_an_error_of_usage_before_any_test(
    pytester: pytest.Pytester, name: str, message: str
) -> None:
    pytester.makepyfile(ENGINE_TESTS)
    result = pytester.runpytest(f"--engine={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(message.split("\n"))


def test_planting_that_is_interrupted_ends_in_a_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.testing.planted.command.run_planted", interrupt)
    result = pytester.runpytest("--planted=1", no_reraise_ctrlc=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["interrupted: nothing is said of faults without a verdict"])
    result.stderr.no_fnmatch_line("Traceback*")
