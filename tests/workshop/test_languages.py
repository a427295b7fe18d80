"""Demonstrations in other languages than Python: programs still, of tasks that reinforcement learning leaves out."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from coderepairrl import config as configs
from coderepairrl import models, stages
from coderepairrl.assembly.imitation import resolve_imitation
from coderepairrl.errors import PrerequisiteError
from coderepairrl.runs.examples import Example, write_examples
from coderepairrl.stages import jobs_file
from coderepairrl.tasks.mutants.corpus_tasks import Exercise, exercise, mutants
from coderepairrl.tasks.mutants.grammars import declared, mutations_in
from coderepairrl.tasks.mutants.languages import LANGUAGE_NAMES, LANGUAGES
from coderepairrl.tasks.select import held_out
from coderepairrl.tokens import load
from workshop.tiny import languages
from workshop.tiny.demonstrations import Habits, another_edit, demonstrate, habits, slipped
from workshop.tiny.disguise import disguise
from workshop.tiny.workspace import Workspace


def exercises(language: str, count: int) -> list[Exercise]:
    rng = Random(language)
    pool = rng.sample(mutants(language), count)
    return [made for made in (exercise(mutant, rng, quoted=True) for mutant in pool) if made is not None]


def stripped(source: str) -> list[str]:
    return [line.strip() for line in source.splitlines()]


@pytest.fixture(scope="module")
def made() -> list[Example]:
    return list(languages.demonstrations(240))


def test_demonstrations_are_of_the_training_tasks_that_the_study_leaves_out(made: list[Example]) -> None:
    splits = {f"mutants/{m.key}-q": m.split for language in LANGUAGE_NAMES for m in mutants(language)}
    assert {splits[each.task_id] for each in made} == {"train"}
    assert all(held_out(each.task_id, languages.SHARE) for each in made)
    assert Counter(each.language for each in made) == dict.fromkeys(LANGUAGE_NAMES, 40)
    asked = tomllib.loads(jobs_file.shipped()["languages"].read_text(encoding="utf-8"))["set"]
    assert f"tasks.holdout={languages.SHARE}" in asked
    again = languages.demonstrations(240)
    assert [next(again) for _ in range(12)] == made[:12]


def test_functions_of_other_languages_are_never_demonstrated_under_their_own_names(made: list[Example]) -> None:
    own = {f"mutants/{m.key}-q": LANGUAGES[name].spelled(m.function.name) for name in LANGUAGES for m in mutants(name)}
    codec = load(models.folder(languages.BASE))
    for each in made:
        if each.language != "python":
            suffix = Path(LANGUAGES[each.language].path).suffix
            assert suffix in str(each.messages[1]["content"]) and f"{own[each.task_id]}(" not in codec.decode(each.ids)


@pytest.mark.parametrize("language", LANGUAGES)
def test_under_other_names_the_reference_passes_and_the_bug_fails(language: str, tmp_path: Path) -> None:
    try:
        LANGUAGES[language].check_programs()
    except PrerequisiteError as error:
        pytest.skip(str(error))
    for number, plain in enumerate(exercises(language, 2)):
        other = disguise(plain, Random(number))
        assert other.path != plain.path and other.path in other.prompt and other.broken_line in other.prompt
        names, others = (declared(each.fixed, language) for each in (plain, other))
        assert [*map(len, names)] == [*map(len, others)] and not {*names[0]} & {*others[0]}
        for content, passes in ((other.fixed, True), (other.files[other.path], False)):
            folder = tmp_path / f"{number}-{passes}"
            folder.mkdir()
            for path, text in {**other.files, other.path: content}.items():
                (folder / path).write_text(text, encoding="utf-8")
            ran = subprocess.run(other.command, cwd=folder, capture_output=True, timeout=60)
            assert (ran.returncode == 0) == passes, (other.path, ran)


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_name_that_is_a_keyword_is_drawn_again(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"for", "char"}
    monkeypatch.setattr("workshop.tiny.disguise.VARIABLES", (*words, *(f"v{number}" for number in range(20))))
    for number, plain in enumerate(exercises(language, 20)):
        names = declared(disguise(plain, Random(number)).fixed, language)[1]
        assert len(names) == len(declared(plain.fixed, language)[1]) and not words & {*names}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_expert_makes_its_mistakes_in_any_language(language: str) -> None:
    exact = 0
    for number, one in enumerate(exercises(language, 60)):
        source, rng = one.files[one.path], Random(number)
        possible = [stripped(m.apply(source)) for m in mutations_in(source, language)]
        possible.append(stripped(source))  # a space at the end of a line for which there is no other mutation
        line, other = another_edit(one, rng)
        assert line != one.broken_line and stripped(source.replace(line, other)) in possible
        assert stripped(source.replace(one.broken_line, slipped(one, rng))) in possible
        workspace = Workspace(one.files)
        for message in demonstrate(one, Habits(), rng):
            for call in message.get("tool_calls", ()):
                workspace.call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        exact += workspace.files[one.path] == one.fixed
        perfect = demonstrate(one, habits(1.0), rng)
        assert not any(str(message["content"]).startswith(("error", "exit")) for message in perfect)
    assert 20 < exact < 52


def test_fine_tuning_takes_them_and_the_study_takes_the_policy_after_two_replacements(
    tmp_path: Path, made: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configs.load(str(Path(languages.__file__).with_name("languages.toml")))
    monkeypatch.chdir(tmp_path)
    Path("runs/languages-warmstart").mkdir(parents=True)
    write_examples(Path("runs/languages-warmstart/languages.parquet"), made[:16])
    plan = resolve_imitation(stages.pinned(config))
    assert plan.examples.counts()["train"] == 16 and not plan.examples.rendered
    text = jobs_file.shipped()["languages"].read_text(encoding="utf-8")
    assert text.count(f'{languages.BASE}"') == 2  # of what is trained, and of what is not
    asked = tomllib.loads(text)
    assert f"model.path={languages.BASE}" in asked["set"]
    assert asked["arms"]["base"]["eval"]["policy"] == languages.BASE
