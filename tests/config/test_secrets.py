"""No secret gets into a run folder or onto a screen by way of a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coderepairrl.config import apply_overrides, explain, load_config, shipped
from coderepairrl.config.secrets import find_secrets
from coderepairrl.errors import ConfigError, UsageError
from coderepairrl.stages import evaluation

SECRET = "s3cr3t-of-mine"
LOOKS_LIKE_ONE = "sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2"
HIDDEN = [
    f"engine.options.api_key={SECRET}",
    f"engine.options.apiKey={SECRET}",
    f"engine.options.key={SECRET}",
    f'engine.options.extra_body={{auth={{token="{SECRET}"}}}}',
    f'engine.options.headers={{Authorization="Basic {SECRET}"}}',
    f'engine.options.args=["--hf-token", "{SECRET}"]',
    f'engine.options.args=["--hf-token={SECRET}"]',
    f'agent.options.env={{OPENAI_API_KEY="{SECRET}"}}',
    f"agent.options.env.DB_PASSWORD={SECRET}",
    "agent.options.env.DB_PASSWORD=12345678",
    f"agent.options.env.GITHUB_PAT={SECRET}",
    f"agent.options.env.SMTP_PASS={SECRET}",
    f"agent.options.env.DB_PW={SECRET}",
    f"agent.options.env.PGPASSWORD={SECRET}",
    f'agent.options.argv=["env", "WANDB_API_KEY={SECRET}", "my-agent"]',
    f'agent.options.argv=["sh", "-c", "OPENAI={LOOKS_LIKE_ONE} my-agent"]',
    f"tasks.options.client_secret={SECRET}",
    f"agent.options.env.OPENAI_API_KEY_2={SECRET}",
    f"agent.options.env.MY_CREDENTIALS={SECRET}",
    f"tasks.options.url=https://example.org/x?api_key={SECRET}",
    f"tasks.options.url=https://me:{SECRET}@example.org/x",
    f'eval.also={{other={{options={{password="{SECRET}"}}}}}}',
    f'kinds.hard.agent={{name="command",options={{env={{MY_TOKEN="{SECRET}"}}}}}}',
]


@pytest.mark.parametrize("given", HIDDEN)
def test_a_secret_in_clear_is_refused_and_not_repeated(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="secret in clear") as refused:
        load_config("hello", [given])
    shown = f"{refused.value} {refused.value.fix}"
    assert SECRET not in shown and LOOKS_LIKE_ONE not in shown and "12345678" not in shown
    assert given.partition("=")[0] in shown and "environment variable" in shown
    for refuse in (
        lambda: apply_overrides(load_config("hello"), [given]),
        lambda: explain("hello", [given]),
        lambda: evaluation.plan_evaluation("builtin:tiny", [given]),
    ):
        with pytest.raises((ConfigError, UsageError)) as again:
            refuse()
        assert SECRET not in str(again.value)


def test_a_file_with_one_is_refused_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'[run]\nname = "a"\n[engine.options]\napi_key = {json.dumps(SECRET)}\n')
    with pytest.raises(ConfigError, match=r"mine\.toml: engine\.options\.api_key is a secret in clear") as refused:
        load_config(file)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        "engine.options.key_env=MY_KEY",
        "engine.options.env_key=MY_KEY",
        'agent.options.env={OPENAI_API_KEY="{api_key}",HOST_API_KEY="$OPENAI_API_KEY"}',
        'agent.options.argv=["my-agent", "--api-key", "{api_key}", "--max-tokens", "512"]',
        'engine.options.args=["--enable-prefix-caching", "--key-file", "/etc/key"]',
        "engine.options.max_tokens=512",
        "engine.options.key=3",
        "engine.options.eos_token=</s>",
        "tasks.options.url=ssh://git@example.org/x",
        "model.path=models/hf-qwen2-instruct-merged-v1",
    ],
)
def test_names_of_variables_placeholders_and_counts_are_none(given: str) -> None:
    load_config("hello", [given])


def test_nothing_that_ships_has_one() -> None:
    for path in shipped().values():
        assert not list(find_secrets(load_config(path).model_dump()))
