"""What holds of any engine whose greedy output is HuggingFace's: laws, each judged or not, with the reason.

A law asserts; what it returns says what was seen. It knows an engine by its answers only. In float32 tokens are held to
equality (tier A); in a narrow dtype, where HuggingFace does not equal itself, to its own noise (tier C).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from weft.testing.continuation import Continuation
from weft.testing.difference import where_tokens_part
from weft.testing.engines.interface import Ability, Answer
from weft.testing.exactness import (
    LOGIT_TOLERANCE,
    Verdict,
    allowed_ties,
    compare_tokens,
    first_difference,
)
from weft.testing.finding import Finding, NotJudged, Outcome, name_of
from weft.testing.forced_flips import judge_flips
from weft.testing.reference import own_noise
from weft.testing.trial import EDGES, Trial

# A logprob is a logit less the logarithm of a sum over all of them, and both move by the logits' tolerance at most.
LOGPROB_TOLERANCE = 2 * LOGIT_TOLERANCE

# Lengths of answers that are asked for beside each other.
_LENGTHS = (1, 2, 3, 7, 16, 17)
_SEEDS = (11, 12, 13, 14)
# Prompts beside the first few, so that no prompt is alone where only one is given; one longer than any common block.
_MATES = (5, 40)
_LONG = 300
# Prompts of the laws that ask more than once; the laws about equality with HuggingFace take all prompts.
_FEW = 6


@dataclass(frozen=True, kw_only=True)
class Law:
    """needs: abilities without which it is not judged.   dtypes: exact: in float32 alone; narrow: in all but that."""

    judge: Callable[[Trial], str]
    needs: tuple[Ability, ...] = ()
    dtypes: Literal["exact", "narrow", "any"] = "exact"

    @property
    def name(self) -> str:
        return name_of(self.judge)


def judge(law: Law, trial: Trial) -> Finding:
    """Judge one law. An engine that fails while it answers has broken it."""
    finding = partial(Finding, law=law.name)
    reason = _reason_not_to(law, trial)
    if reason is not None:
        return finding(outcome=Outcome.NOT_JUDGED, words=reason)
    try:
        return finding(outcome=Outcome.HOLDS, words=law.judge(trial))
    except NotJudged as nothing:
        return finding(outcome=Outcome.NOT_JUDGED, words=str(nothing))
    except AssertionError as broken:
        return finding(outcome=Outcome.BROKEN, words=str(broken))
    except Exception as error:
        return finding(outcome=Outcome.BROKEN, words=f"the engine failed: {type(error).__name__}: {error}")


def tokens_equal_huggingface(trial: Trial) -> str:
    return _equal_to_reference(trial, trial.references, trial.answered)


def prompts_at_the_edges_of_blocks_equal_huggingface(trial: Trial) -> str:
    prompts = trial.prompts_of(EDGES)
    if not prompts:
        raise NotJudged("none of these prompts can be given to the engine")
    references = [trial.reference.generate(prompt, trial.max_new_tokens) for prompt in prompts]
    answers = trial.ask([trial.job(prompt, trial.max_new_tokens) for prompt in prompts])
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    return f"{_equal_to_reference(trial, references, answers)}; prompts of {lengths}"


def flips_lie_within_huggingfaces_own_noise(trial: Trial) -> str:
    return judge_flips(trial)


def logits_equal_huggingface(trial: Trial) -> str:
    largest = 0.0
    for place, (reference, answer) in enumerate(zip(trial.references, trial.answered, strict=True)):
        assert answer.logits is not None
        shared = _shared(reference, answer)
        gap = float((reference.logits[:shared] - answer.logits[:shared]).abs().max())
        assert gap <= LOGIT_TOLERANCE, f"prompt {place}: logits differ by {gap:.3g}, at most {LOGIT_TOLERANCE:g}"
        largest = max(largest, gap)
    return f"largest difference {largest:.1e}, at most {LOGIT_TOLERANCE:g}"


def logprobs_equal_huggingface(trial: Trial) -> str:
    largest = 0.0
    for place, (reference, answer) in enumerate(zip(trial.references, trial.answered, strict=True)):
        assert answer.logprobs is not None
        assert answer.token_ids is not None
        shared = _shared(reference, answer)
        of_tokens = torch.tensor(answer.token_ids[:shared])[:, None]
        expected = reference.logits[:shared].log_softmax(dim=-1).gather(-1, of_tokens)[:, 0]
        gap = float((expected - torch.tensor(answer.logprobs[:shared])).abs().max())
        assert gap <= LOGPROB_TOLERANCE, f"prompt {place}: logprobs differ by {gap:.3g}, at most {LOGPROB_TOLERANCE:g}"
        largest = max(largest, gap)
    return f"largest difference {largest:.1e}, at most {LOGPROB_TOLERANCE:g}"


def finish_reasons_equal_huggingface(trial: Trial) -> str:
    judged = []
    for place, (reference, answer) in enumerate(zip(trial.references, trial.answered, strict=True)):
        if answer.said == trial.said_by(reference):  # another text may end elsewhere
            wrong = f"prompt {place}: ends by {answer.finish_reason!r}, HuggingFace by {reference.finish_reason!r}"
            assert answer.finish_reason == reference.finish_reason, wrong
            judged.append(reference.finish_reason)
    if not judged:
        raise NotJudged("no answer is HuggingFace's, so none has to end as its")
    counts = ", ".join(f"{judged.count(reason)} by {reason}" for reason in sorted(set(judged)))
    return f"{len(judged)} answers end alike: {counts}"


def an_answer_ends_at_its_own_length(trial: Trial) -> str:
    prompts = [trial.tellable[place % len(trial.tellable)] for place in range(len(_LENGTHS))]
    answers = trial.ask([trial.job(prompt, length) for prompt, length in zip(prompts, _LENGTHS, strict=True)])
    ended_early = 0
    for length, answer in zip(_LENGTHS, answers, strict=True):
        if answer.length is None:
            raise NotJudged("the engine tells neither token ids nor how many there were")
        assert answer.length <= length, f"{answer.length} tokens, asked for {length} at most"
        if answer.length < length:
            ended_early += 1
            assert _may_stop(trial, answer), f"{answer.length} of {length} tokens, and no EOS id ends them"
    return f"answers of {', '.join(map(str, _LENGTHS))} tokens at once; {ended_early} ended by EOS before"


def stop_token_ids_end_an_answer(trial: Trial) -> str:
    cases = [(reference, stop) for reference in trial.references[:_FEW] if (stop := _stop_place(reference)) is not None]
    if not cases:
        raise NotJudged("no answer of HuggingFace's has a token that is new after the first")
    # The first of them once more, without its stop id: it must not end by another's.
    free = cases[0][0]
    jobs = [trial.job(free.prompt_token_ids, trial.max_new_tokens)]
    jobs += [
        trial.job(one.prompt_token_ids, trial.max_new_tokens, stop_token_ids=[one.token_ids[stop]])
        for one, stop in cases
    ]
    unstopped, *stopped = trial.ask(jobs)
    assert unstopped.token_ids == free.token_ids, (
        "a request without stop ids says something else beside those with some"
    )
    for place, ((reference, stop), answer) in enumerate(zip(cases, stopped, strict=True)):
        expected = reference.token_ids[: stop + 1]
        wrong = f"request {place} must end with token {expected[-1]} at step {stop}"
        assert answer.token_ids is not None
        assert answer.token_ids == expected, f"{wrong}: {_parted(expected, answer.token_ids)}"
        assert answer.finish_reason in {None, "stop"}, f"{wrong}, by stop; it ended by {answer.finish_reason!r}"
    return f"{len(cases)} answers end with their own stop id, one beside them that has none does not"


def batch_mates_change_nothing(trial: Trial) -> str:
    prompts = [*trial.tellable[:_FEW], *trial.prompts_of(_MATES)]
    alone = [trial.ask([trial.job(prompt, trial.max_new_tokens)])[0] for prompt in prompts]
    for name, order in (("together", prompts), ("in reverse", prompts[::-1])):
        together = trial.ask([trial.job(prompt, trial.max_new_tokens) for prompt in order])
        beside = together if order is prompts else together[::-1]
        for place, (one, other) in enumerate(zip(alone, beside, strict=True)):
            wrong = f"prompt {place} says something else beside {len(prompts) - 1} others, {name}"
            assert one.said == other.said, f"{wrong}: {_parted(one.said, other.said)}"
            assert one.finish_reason == other.finish_reason, f"{wrong}: it ends by {other.finish_reason!r}"
    return f"{len(prompts)} prompts alone, together and in reverse"


def a_prompt_again_says_the_same(trial: Trial) -> str:
    prompt = max([*trial.tellable, *trial.prompts_of([_LONG])], key=len)
    job = trial.job(prompt, trial.max_new_tokens)
    first, *rest = [*trial.ask([job]), *trial.ask([job] * 3), *trial.ask([job])]
    for place, again in enumerate(rest):
        wrong = f"the prompt of {len(prompt)} tokens says something else at time {place + 2}"
        assert again.said == first.said, f"{wrong}: {_parted(first.said, again.said)}"
    return f"a prompt of {len(prompt)} tokens, once, three times at once, and once more"


def a_seed_reproduces_and_another_differs(trial: Trial) -> str:
    prompt = trial.tellable[0]
    jobs = [trial.job(prompt, trial.max_new_tokens, seed=seed) for seed in _SEEDS]
    together = trial.ask(jobs)
    alone = [trial.ask([job])[0] for job in jobs]
    for job, one, other in zip(jobs, alone, together, strict=True):
        assert one.said == other.said, f"seed {job.seed} alone and in a batch: {_parted(one.said, other.said)}"
    assert len({answer.said for answer in alone}) > 1, f"{len(_SEEDS)} seeds draw the same answer"
    return f"{len(_SEEDS)} seeds, alone and in a batch"


LAWS = (
    Law(judge=tokens_equal_huggingface),
    Law(judge=flips_lie_within_huggingfaces_own_noise, needs=("prompt_token_ids", "token_ids"), dtypes="narrow"),
    Law(judge=logits_equal_huggingface, needs=("logits", "token_ids")),
    Law(judge=logprobs_equal_huggingface, needs=("logprobs", "token_ids")),
    Law(judge=finish_reasons_equal_huggingface, needs=("finish_reasons",), dtypes="any"),
    Law(judge=prompts_at_the_edges_of_blocks_equal_huggingface),
    Law(judge=an_answer_ends_at_its_own_length, dtypes="any"),
    Law(judge=stop_token_ids_end_an_answer, needs=("stop_token_ids", "token_ids")),
    Law(judge=batch_mates_change_nothing),
    Law(judge=a_prompt_again_says_the_same),
    Law(judge=a_seed_reproduces_and_another_differs, needs=("seeds",)),
)


def _reason_not_to(law: Law, trial: Trial) -> str | None:
    needs = law.needs if law.dtypes == "any" else ("dtype", *law.needs)
    lacking = trial.lacks(*needs)
    is_exact = trial.model.dtype == torch.float32
    if lacking is not None:
        return lacking
    if law.dtypes == "exact" and not is_exact:
        return f"in {trial.model.dtype_name} near ties may flip: judged in float32"
    if law.dtypes == "narrow" and is_exact:
        return "in float32 nothing may flip: judged in narrow dtypes"
    if not trial.tellable:
        return "no prompt has a text that gives back its tokens, and the engine takes text alone"
    return None


def _equal_to_reference(trial: Trial, references: Sequence[Continuation], answers: Sequence[Answer]) -> str:
    ties, wrong = 0, []
    for place, (reference, answer) in enumerate(zip(references, answers, strict=True)):
        if answer.token_ids is None:
            if answer.said != trial.said_by(reference):
                wrong.append(f"prompt {place}: {_parted(trial.said_by(reference), answer.said)}")
            continue
        noise = partial(own_noise, trial.reference, reference)
        verdict, reason = compare_tokens(reference, answer.token_ids, None, noise=noise)
        ties += verdict is Verdict.TIE
        if verdict is Verdict.DIFFERENT:
            where = first_difference(reference.token_ids, answer.token_ids)
            assert where is not None
            around = where_tokens_part(reference.token_ids, answer.token_ids, where, trial.decode)
            wrong.append("\n  ".join([f"prompt {place}, step {where}: {reason}", *around]))
    num_tokens = sum(len(reference.token_ids) for reference in references)
    assert not wrong, f"{len(wrong)} of {len(references)} answers differ:\n" + "\n".join(wrong)
    assert ties <= allowed_ties(num_tokens), f"{ties} ties in {num_tokens} tokens"
    what = "texts" if trial.lacks("token_ids") else "answers"
    return f"{len(references)} {what}, {num_tokens} tokens, {ties} ties"


def _shared(reference: Continuation, answer: Answer) -> int:
    """Steps that both took from the same tokens."""
    assert answer.token_ids is not None
    place = first_difference(reference.token_ids, answer.token_ids)
    shared = len(reference.token_ids) if place is None else place + 1
    return min(shared, len(reference.token_ids), len(answer.token_ids))


def _may_stop(trial: Trial, answer: Answer) -> bool:
    ends = trial.model.checkpoint.generation.eos_token_ids
    if answer.token_ids is None:
        return answer.finish_reason in {None, "stop"}
    return bool(answer.token_ids) and answer.token_ids[-1] in ends


def _stop_place(reference: Continuation) -> int | None:
    """A step before the last whose token did not come before."""
    tokens = reference.token_ids
    return next((step for step in range(1, len(tokens) - 1) if tokens[step] not in tokens[:step]), None)


def _parted(expected: tuple[int, ...] | str | None, found: tuple[int, ...] | str | None) -> str:
    if isinstance(expected, tuple) and isinstance(found, tuple):
        place = first_difference(expected, found)
        lines = where_tokens_part(expected, found, 0 if place is None else place)
        return "\n  ".join(["", *(line.replace("reference ", "expected  ") for line in lines)])
    return f"{found!r}, expected {expected!r}"
