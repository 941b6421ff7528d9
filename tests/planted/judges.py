"""Faults of the laws that any engine is held to, and of what the reference said before: each acquits somebody."""

from functools import partial

from weft.testing.planted.fault import Fault

_LAWS = "tests/unit/testing/test_laws.py"
_CONVICTED = f"{_LAWS}::test_a_fault_is_convicted_by_its_laws_and_no_other"
_FLIPS = f"{_LAWS}::test_in_a_narrow_dtype_flips_are_excused_as_far_as_the_references_own"
_CACHE = "tests/unit/testing/test_oracle_cache.py"
_laws = partial(Fault, file="weft/testing/laws.py", tier="tests/unit")
_flips = partial(Fault, file="weft/testing/forced_flips.py", tier="tests/unit")
_cache = partial(Fault, file="weft/testing/oracle_cache.py", tier="tests/unit")

LAWS = (
    _laws(
        name="any logits equal HuggingFace's",
        old="        assert gap <= LOGIT_TOLERANCE, f",
        new="        assert gap >= 0, f",
        why="Tokens agree long before logits do.",
        killers=(f"{_CONVICTED}[logits off by twice the tolerance]",),
    ),
    _laws(
        name="logprobs that are not numbers equal HuggingFace's",
        old="        assert gap <= LOGPROB_TOLERANCE, f",
        new="        assert not gap > LOGPROB_TOLERANCE, f",
        why="A comparison with NaN is false, whichever way it is put.",
        killers=(f"{_CONVICTED}[logprobs that are not numbers]",),
    ),
    _laws(
        name="logits are compared where the texts have parted",
        old="    shared = len(reference.token_ids) if place is None else place + 1\n",
        new="    shared = len(reference.token_ids)\n",
        why="One wrong token breaks laws that say nothing of it.",
        killers=(f"{_CONVICTED}[a wrong token]",),
    ),
    _laws(
        name="a broken law is not judged",
        old="        return finding(outcome=Outcome.BROKEN, words=str(broken))\n",
        new="        return finding(outcome=Outcome.NOT_JUDGED, words=str(broken))\n",
        why="A report of what was not judged is green.",
        killers=(_CONVICTED,),
    ),
    _laws(
        name="an engine that fails is not judged",
        old='        return finding(outcome=Outcome.BROKEN, words=f"the engine failed',
        new='        return finding(outcome=Outcome.NOT_JUDGED, words=f"the engine failed',
        why="Who crashes is acquitted.",
        killers=(f"{_LAWS}::test_an_engine_that_fails_has_broken_the_law_and_says_how",),
    ),
    _laws(
        name="ties of an engine are not counted",
        old="        ties += verdict is Verdict.TIE\n",
        new="        ties += verdict is Verdict.DIFFERENT\n",
        why="Any number of excuses is one too few.",
        killers=(f"{_LAWS}::test_a_tie_is_excused_and_a_second_one_is_too_many",),
    ),
    _laws(
        name="answers in reverse are held to the wrong prompts",
        old="        beside = together if order is prompts else together[::-1]\n",
        new="        beside = together\n",
        why="A sound engine is convicted.",
        killers=(f"{_LAWS}::test_a_sound_engine_is_acquitted_by_every_law",),
    ),
    _laws(
        name="nobody looks at the request that has no stop id",
        old="    assert unstopped.token_ids == free.token_ids, (\n",
        new="    assert unstopped.token_ids is not None, (\n",
        why="A set of stop ids that a batch shares ends whoever is in it.",
        killers=(f"{_CONVICTED}[stop ids of others end a request that has none]",),
    ),
    _laws(
        name="seeds need not differ",
        old="    assert len({answer.said for answer in alone}) > 1, f",
        new="    assert len({answer.said for answer in alone}) > 0, f",
        why="A seed that nobody reads reproduces as well.",
        killers=(f"{_CONVICTED}[one seed for all]",),
    ),
    _laws(
        name="any token may end an answer early",
        old="    return bool(answer.token_ids) and answer.token_ids[-1] in ends\n",
        new="    return bool(answer.token_ids)\n",
        why="A token is missing, and it looks like a stop.",
        killers=(f"{_CONVICTED}[an answer ends a token early]",),
    ),
    _laws(
        name="what an engine lacks is judged",
        old="    if lacking is not None:\n        return lacking\n",
        new="",
        why="Who says what he cannot do is convicted of it.",
        killers=(f"{_LAWS}::test_what_an_engine_lacks_is_not_judged_and_the_reason_is_its_own",),
    ),
    _flips(
        name="every flip is excused",
        old="        if not margin <= allowed:\n",
        new="        if not margin >= 0:\n",
        why="In a narrow dtype no fault would ever be seen.",
        killers=(_FLIPS,),
    ),
    _flips(
        name="as many flips as positions",
        old="    assert len(flips) <= most, counts\n",
        new="    assert len(flips) <= num_positions, counts\n",
        why="Each lies within noise, and together they do not.",
        killers=(_FLIPS,),
    ),
    _flips(
        name="after its first flip an answer is not judged",
        old="            if place + 1 < len(expected):\n",
        new="            if place + 1 < 0:\n",
        why="One excused flip hides all that follow.",
        killers=(_FLIPS,),
    ),
)

ORACLE = (
    _cache(
        name="an entry is believed whatever is in it",
        old="safetensors.torch.load(payload) if digest == _digest(name, payload) else None",
        new="safetensors.torch.load(payload) if digest else None",
        why="A bit that a disk turned is what every engine is held to.",
        killers=(f"{_CACHE}::test_an_entry_that_is_not_what_was_written_is_computed_again[one bit]",),
    ),
    _cache(
        name="an entry may be another's",
        old="    return hashlib.sha256(name + payload).digest()\n",
        new="    return hashlib.sha256(payload).digest()\n",
        why="Files that were renamed answer for each other.",
        killers=(f"{_CACHE}::test_an_entry_that_is_not_what_was_written_is_computed_again[of another]",),
    ),
    _cache(
        name="the digest of weights knows no names",
        old='f"{name}\\0{hashlib.file_digest',
        new='f"{hashlib.file_digest',
        why="HuggingFace reads by name: a renamed file is another model.",
        killers=(f"{_CACHE}::test_the_digest_is_of_contents_and_of_what_is_read",),
    ),
    _cache(
        name="pickled weights are not in the digest",
        old='{".json", ".safetensors", ".bin"}',
        new='{".json", ".safetensors"}',
        why="Other weights, and the results of the old ones.",
        killers=(f"{_CACHE}::test_the_digest_is_of_contents_and_of_what_is_read",),
    ),
    Fault(
        name="results outlive the version that computed them",
        file="weft/testing/oracle.py",
        tier="tests/unit",
        old='            "transformers": transformers.__version__,\n',
        new="",
        why="A new release is judged by what an old one said.",
        killers=(f"{_CACHE}::test_other_versions_are_computed_anew[transformers]",),
    ),
)
