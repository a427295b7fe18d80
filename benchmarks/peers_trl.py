"""TRL's `GRPOTrainer` on the tasks, tools, sandboxes and rewards of `crrl hello`: the other side of `peers.py`.

TRL uses our parts where both sides must be alike, and its own everywhere else:

- tools: an environment (`environment_factory`) whose tools are Nano's, executed in our sandboxes. They are
  coroutines, sandboxes are opened while prompts are tokenized and answers sampled, and rewards are computed
  concurrently: the fastest way that TRL's interfaces allow;
- rewards: those of the configuration, on the diff of each sandbox;
- format: the tokenizer's own chat template, with the schemas of the two tools that the policy was trained on (TRL would
  word them differently), and TRL's parser of Qwen3's answers.

With the agent `direct` there are no tools: a prompt holds the files that our agent shows, and the edits of the one
answer are applied in a sandbox and rewarded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging as hf_logging
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from benchmarks.stages import Stages, Turns
from coderepairrl.agents.direct import Direct, limit_context_chars, list_tracked_files
from coderepairrl.agents.nano import Nano
from coderepairrl.agents.tools import Result, Tools
from coderepairrl.plan import Plan
from coderepairrl.protocols import Sandbox
from coderepairrl.rewards import score_episode
from coderepairrl.types import Ending, Episode, Limits, Task, ToolCall, total

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "trl": {},
    "trl-micro1": {"per_device_train_batch_size": 1},
    "trl-micro8": {"per_device_train_batch_size": 8},
    "trl-micro16": {"per_device_train_batch_size": 16},
    "trl-paged": {"use_transformers_continuous_batching": True},
}
"""Settings of `GRPOConfig` that may be quicker than the plain ones, by the name of the contestant."""
_LISTED = "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}"


def tokenizer(folder: Path, tools: Sequence[Mapping[str, Any]]) -> PreTrainedTokenizerFast:
    """The policy's tokenizer, whose template always shows `tools` instead of the schemas that TRL makes."""
    policy_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if not tools:
        return policy_tokenizer
    if _LISTED not in policy_tokenizer.chat_template:
        raise ValueError(f"the template of {folder} lists tools in another way than this expects: {_LISTED}")
    shown = "".join(f"\n{json.dumps(tool)}" for tool in tools)
    policy_tokenizer.chat_template = policy_tokenizer.chat_template.replace(_LISTED, f"{{{{- {json.dumps(shown)} -}}}}")
    policy_tokenizer.response_template = qwen3_template
    return policy_tokenizer


class Shared:
    """State that all environments of a trainer share. `loop` is the event loop on which TRL awaits tools."""

    def __init__(self, plan: Plan) -> None:
        self.terms = plan.kinds[""]
        agent = self.terms.agent
        if not isinstance(agent, Nano | Direct):
            raise TypeError(f"{agent.name} is neither nano, whose tools the environment has, nor direct")
        self.agent: Nano | Direct = agent
        self.tasks = {task.id: task for task in plan.train_tasks}
        self.loop: asyncio.AbstractEventLoop
        self.report: dict[str, Any] = {}
        """Measurements of the current step."""

    async def score(self, task: Task, done: Sequence[ToolCall], patch: bytes) -> float:
        """The reward of an attempt's diff and calls."""
        episode = Episode("", task.id, "train", 0, "", 0, Ending.DONE, tool_calls=tuple(done), patch=patch)
        return total(await score_episode(self.terms.rewards["train"], task, episode, self.terms.sandbox))

    async def first_messages(self, task: Task, limits: Limits) -> list[dict[str, Any]]:
        """The agent's first messages, with the files that `direct` shows."""
        if isinstance(self.agent, Nano):
            return [dict(each) for each in self.agent.first_request(task).messages]
        async with self.terms.sandbox.open(task) as box:
            room = limit_context_chars(self.agent.options.context_chars, limits)
            prompt, _ = await self.agent._build_prompt(task, box, await list_tracked_files(box), room)
        return self.agent._build_messages(task, prompt)

    async def apply(self, task: Task, answer: str, limits: Limits) -> tuple[float, list[ToolCall]]:
        """The reward and edits of an answer of `direct`."""
        assert isinstance(self.agent, Direct)
        async with self.terms.sandbox.open(task) as box:
            paths = await list_tracked_files(box)
            _, files = await self.agent._build_prompt(
                task, box, paths, limit_context_chars(self.agent.options.context_chars, limits)
            )
            done = await self.agent._apply_reply_edits(answer, box, paths, files, cut_off=False)
            patch = await box.diff()
        return await self.score(task, done, patch), done


class Workspace:
    """A sandbox, from `reset` to the reward. Its public coroutines are the tools."""

    _shared: Shared

    def reset(self, task: str, **row: Any) -> None:
        """Start opening a sandbox for `task`; the first tool call waits until it is open."""
        self._task = self._shared.tasks[task]
        self._done: list[ToolCall] = []
        self._stack = AsyncExitStack()
        self._opening: Future[Tools] = asyncio.run_coroutine_threadsafe(self._open(), self._shared.loop)

    async def _open(self) -> Tools:
        self._box: Sandbox = await self._stack.enter_async_context(self._shared.terms.sandbox.open(self._task))
        assert isinstance(self._shared.agent, Nano)
        options = self._shared.agent.options
        return Tools(self._box, options.texts(), options.output_chars)

    async def shell(self, cmd: str) -> str:
        """Run a command.

        Args:
            cmd: The command line.
        """
        return await self._run("shell", {"cmd": cmd})

    async def apply_patch(self, file_path: str, old_content: str, new_content: str) -> str:
        """Replace a passage of a file.

        Args:
            file_path: Path of the file.
            old_content: What to replace.
            new_content: What to put in its place.
        """
        arguments = {"file_path": file_path, "old_content": old_content, "new_content": new_content}
        return await self._run("apply_patch", arguments)

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool call as `Nano` does."""
        assert isinstance(self._shared.agent, Nano)
        options, began = self._shared.agent.options, time.monotonic()
        tools = await asyncio.wrap_future(self._opening)
        result = await tools.run(name, arguments, options.shell_seconds)
        assert isinstance(result, Result)
        text = result.text
        if result.truncated or len(text) > options.output_chars:
            text = f"{text[: options.output_chars]}\n{options.texts().truncated}"
        seconds = time.monotonic() - began
        self._done.append(ToolCall(0, name, json.dumps(arguments), result.ok, len(text), seconds))
        return text

    async def _score(self) -> float:
        """Close the sandbox and score its diff. Raises what opening it raised."""
        await asyncio.wrap_future(self._opening)
        async with self._stack:
            patch = await self._box.diff()
        return await self._shared.score(self._task, self._done, patch)


class Peer(GRPOTrainer):
    """The unchanged trainer, with its stages measured."""

    stages: Stages
    shared: Shared

    def training_step(self, *arguments: Any) -> Any:
        self.stages.enter("learn")  # until the end of the step, except nested stages
        return super().training_step(*arguments)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self.stages.within("rollout"):
            batch = super()._generate_and_score_completions(inputs)
        prompts, completion_mask = batch["prompt_mask"].sum(1), batch["completion_mask"]
        self.shared.report |= {
            "prompt": int(prompts.sum()),
            "rows": (prompts + completion_mask.sum(1)).tolist(),
            "sampled": int((completion_mask * batch.get("tool_mask", 1)).sum()),
        }
        return batch

    def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
        report = self.shared.report
        report["turns"] = report.get("turns", 0) + len(arguments[0])
        with self.stages.within("generate"):
            return super()._generate_single_turn(*arguments, **named)

    def _calculate_rewards(self, *arguments: Any) -> Any:
        with self.stages.within("reward"):
            return super()._calculate_rewards(*arguments)


class Steps(TrainerCallback):
    """Waits for this side's turn before each step, and reports its measurements afterwards."""

    def __init__(self, shared: Shared, stages: Stages, turns: Turns) -> None:
        self.shared, self.stages, self.turns = shared, stages, turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.stages.leave()
        self.turns.wait()
        self.stages.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.turns.tell(self.stages.end() | self.shared.report)
        self.shared.report = {}


def build(plan: Plan, order: Sequence[Task], folder: Path, variant: str, turns: Turns) -> Peer:
    """Build TRL's trainer on the tasks of all steps in `order`, with the settings of `plan`."""
    hf_logging.disable_progress_bar()
    config, shared, stages = plan.config, Shared(plan), Stages()
    rollout, train = config.rollout, config.train
    size = rollout.tasks_per_step * rollout.group_size
    processing = tokenizer(plan.model.folder, shared.agent.first_request(order[0]).tools)
    limits = Limits(rollout.calls, rollout.tokens, rollout.seconds, rollout.turn_tokens)
    prompts = asyncio.run(_prompts(shared, order, limits))
    with_tools = isinstance(shared.agent, Nano)
    tools = [{}] if with_tools else None
    longest = max(
        len(processing.apply_chat_template(each, tools=tools, add_generation_prompt=True, return_dict=False))
        for each in prompts
    )
    chosen = {"per_device_train_batch_size": size, **VARIANTS[variant]}
    arguments = GRPOConfig(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=train.gradient_checkpointing,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        shuffle_dataset=False,
        seed=config.run.seed,
        max_steps=config.run.steps,
        num_generations=rollout.group_size,
        gradient_accumulation_steps=size // chosen["per_device_train_batch_size"],
        temperature=rollout.temperature,
        max_completion_length=rollout.tokens - longest,
        generation_kwargs={"max_new_tokens": rollout.turn_tokens},
        max_tool_calling_iterations=rollout.calls,
        beta=0.0,
        loss_type="grpo",
        importance_sampling_level="sequence",
        learning_rate=train.lr,
        lr_scheduler_type="constant",
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        model_init_kwargs={"dtype": "float32"},
        **chosen,
    )

    def report_rewards(tasks: Sequence[str], calls: int, rewards: list[float]) -> list[float]:
        groups = [rewards[at : at + rollout.group_size] for at in range(0, size, rollout.group_size)]
        shared.report |= {"tasks": sorted(set(tasks)), "calls": calls, "rewards": groups}
        return rewards

    async def reward(environments: Sequence[Workspace], **rest: Any) -> list[float]:
        rewards = await asyncio.gather(*(each._score() for each in environments))
        return report_rewards(
            [each._task.id for each in environments], sum(len(each._done) for each in environments), rewards
        )

    async def reward_of_answers(completions: Sequence[Any], task: Sequence[str], **rest: Any) -> list[float]:
        answers = zip(task, completions, strict=True)
        pairs = await asyncio.gather(
            *(shared.apply(shared.tasks[at], each[0]["content"], limits) for at, each in answers)
        )
        return report_rewards(task, sum(len(done) for _, done in pairs), [value for value, _ in pairs])

    lora = train.lora and LoraConfig(
        r=train.lora.rank, lora_alpha=train.lora.alpha, lora_dropout=0.0, target_modules=list(train.lora.targets)
    )
    trainer = Peer(
        model=str(plan.model.folder),
        reward_funcs=reward if with_tools else reward_of_answers,
        args=arguments,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt, "task": task.id} for prompt, task in zip(prompts, order, strict=True)]
        ),
        processing_class=processing,
        environment_factory=type("Workspace", (Workspace,), {"_shared": shared}) if with_tools else None,
        peft_config=lora or None,
        callbacks=[Steps(shared, stages, turns)],
    )
    shared.loop = trainer.async_loop
    trainer.stages, trainer.shared = stages, shared
    return trainer


async def _prompts(shared: Shared, order: Sequence[Task], limits: Limits) -> list[list[dict[str, Any]]]:
    return [await shared.first_messages(task, limits) for task in order]


def order_of(plan: Plan, steps: int) -> list[Task]:
    """The tasks of the first `steps` steps, in the order of our loop."""
    return [task for step in range(1, steps + 1) for task in plan.curriculum.schedule(step)]


def run(plan: Plan, folder: Path, variant: str, turns: Turns) -> None:
    """Run all steps of `plan`, each when it is its turn."""
    torch.set_num_threads(1)
    build(plan, order_of(plan, plan.config.run.steps), folder, variant, turns).train()
