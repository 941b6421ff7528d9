"""What `--engine` asks of weft is looked at before anything else is done, whichever experiment takes it."""

from typing import Any

import pytest

from weft.benchmark.experiments import known_experiments
from weft.benchmark.experiments.offline import OfflineOptions
from weft.benchmark.shapes import ShapeCheckpoint
from weft.cli import main
from weft.errors import ConfigError

TINY = ["--device", "cpu", "--dtype", "float32", "--shape", "llama-tiny"]
TAKING = {
    "offline": ["--suite", "ladder", "--cases", "8", *TINY],
    "ladder": ["--in-flight", "8", *TINY],
    "steps": ["--batch", "2", "--context", "64", "--steps", "5", *TINY],
    "prefill": ["--prompts", "32", *TINY],
}


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever measures or reads weights fails the test."""

    def never(*given: object) -> Any:
        pytest.fail("it was looked at too late")

    monkeypatch.setattr("weft.benchmark.provenance.calibrate", never)
    monkeypatch.setattr(ShapeCheckpoint, "tensors", never)


def test_every_experiment_that_takes_it_is_tried_here() -> None:
    experiments = known_experiments().items()
    assert sorted(TAKING) == sorted(name for name, one in experiments if hasattr(one.options, "engine"))


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("policy=nosuch", "unknown policy='nosuch'"),
        ("attention_backend=nosuch", "unknown attention_backend='nosuch'"),
        ("max_prefills_per_round=2,policy=fcfs", "max_prefills_per_round=2 says nothing to policy='fcfs'"),
        ("max_model_len=32768", "max_model_len=32768 exceeds"),
        ("max_model_len=8", "max_model_len=8 holds no"),
        ("max_num_batched_tokens=4,max_num_seqs=8", "max_num_batched_tokens=4 is below"),
        ("num_blocks=1,attention_backend=paged_gather", "num_blocks=1 of 16 tokens do not hold"),
        ("foo=1", "unknown argument 'foo'"),
        ("operations=plain,kernel_choice=library", "kernel_choice='library' has no effect"),
        ("attention_backend=contiguous,num_blocks=3", "num_blocks=3"),
    ],
)
@pytest.mark.parametrize("name", TAKING)
def test_an_engine_that_cannot_be_is_an_error_before_anything_is_done(
    name: str, engine: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", name, *TAKING[name], "--engine", engine]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "hint: " in err


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ["steps", "prefill"])
def test_the_last_shape_is_looked_at_before_the_first_is_measured(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for shapes in ("llama-tiny,llama-9b", "llama-tiny,"):
        assert main(["bench", name, *TAKING[name][:-1], shapes]) == 2
        assert f"unknown shape={shapes.partition(',')[2]!r}" in capsys.readouterr().err


@pytest.mark.usefixtures("untouched")
def test_all_that_decode_at_once_need_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Or some would wait while the step of all of them is measured."""
    assert main(["bench", "steps", *TAKING["steps"], "--engine", "num_blocks=10"]) == 2
    assert "num_blocks=10 of 16 tokens do not hold 2 requests of up to" in capsys.readouterr().err


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("name", ["offline", "continuous", "memory"])
def test_prompts_that_no_model_holds_are_not_drawn(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.benchmark.workload.Lengths.draw", lambda *given: pytest.fail("drawn"))
    assert main(["bench", name, *TINY, "--prompts", "8,99999999"]) == 2
    assert "prompts of 99999999 tokens leave no room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"systems": "hf_static", "engine": "overlap=false"}, "engine='overlap=false' is weft's"),
        ({"systems": "weft", "hf_requests": 4}, "hf_requests=4 is hf_static's"),
    ],
)
def test_what_none_of_the_systems_reads_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OfflineOptions(suite="ladder", **options)
