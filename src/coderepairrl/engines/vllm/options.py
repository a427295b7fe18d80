"""Checks of the vLLM engine's options."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coderepairrl.engines.limits import check_integer_option, check_positive_option
from coderepairrl.errors import ConfigError
from coderepairrl.printable import remove_login

SLOTS, MAX_LORAS = 256, 2
"""Defaults: concurrent requests and adapters at the server."""
RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Values that ``--max-lora-rank`` accepts."""
FP32_HEAD = '{"head_dtype": "float32"}'
"""Value of ``--hf-overrides`` for logits in float32 in vLLM 0.32: hidden states and head keep their type, their product
is summed and kept in float32 (its `LogitsProcessor`)."""
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


def find_sufficient_rank(rank: int) -> int:
    """Smallest ``--max-lora-rank`` for `rank`. Raises `ConfigError`.

    >>> find_sufficient_rank(24)
    32
    """
    for each in RANKS:
        if each >= rank:
            return each
    raise ConfigError(
        f"adapters have rank {rank}, and vLLM takes at most rank {RANKS[-1]}",
        fix=f"lower train.lora.rank to {RANKS[-1]}, or set engine.options.lora_rank=0 to send merged weights",
    )


def is_half(dtype: str) -> bool:
    """Whether numbers of the type `dtype` have 16 bits."""
    return dtype.endswith(("16", "half"))


_NO_ADDRESS = "leave it out: the server listens on a private socket; engine.options.url joins a running server"
# arguments that are refused, each with what to do instead
_REFUSED_ARGUMENTS = {
    "--model": "set model.path",
    "--max-model-len": "set engine.options.context",
    "--max-num-seqs": "set engine.options.slots",
    "--dtype": "set engine.options.dtype",
    "--enable-lora": "set engine.options.lora_rank",
    "--max-lora-rank": "set engine.options.lora_rank",
    "--max-loras": "set engine.options.max_loras",
    "--seed": "leave it out: every request has its seed, from run.seed",
    "--served-model-name": "leave it out: only this run uses the server",
    "--logprobs-mode": "leave it out: logprobs are those that the learner computes",
    "--generation-config": "leave it out: the run says how tokens are sampled",
    "--config": "leave it out, and give the settings of the file here",
    **dict.fromkeys(("--uds", "--host", "--port", "--api-key"), _NO_ADDRESS),
}
# negative numbers are values, although they begin with a dash as arguments do
_NUMBER = re.compile(r"-\d+(\.\d*)?")


@dataclass(frozen=True, slots=True)
class Argument:
    """A user's argument for vLLM.

    >>> [argument] = parse_arguments(["--max_model_len=4096"])
    >>> argument.name, argument.value, argument.means("--max-model-len")
    ('--max-model-len', '4096', True)
    """

    name: str
    """Name with dashes, as in vLLM, without any part after a dot."""
    value: str
    """Value, or empty."""
    words: tuple[str, ...]
    """Words as written, up to the next argument."""

    def means(self, *names: str) -> bool:
        """Whether it is one of `names`, perhaps shortened, as vLLM allows."""
        can_be_short = self.name.startswith("--") and len(self.name) > 2
        return self.name in names or (can_be_short and any(name.startswith(self.name) for name in names))


def parse_arguments(args: Sequence[str]) -> list[Argument]:
    """Split a command line into arguments."""
    groups: list[list[str]] = []
    for word in args:
        if not groups or (word.startswith("-") and not _NUMBER.fullmatch(word)):
            groups.append([])
        groups[-1].append(word)
    arguments = []
    for first, *more in groups:
        name, equals, value = first.partition("=")
        value = value if equals else "".join(more[:1])
        if name.startswith("--"):
            name = name.partition(".")[0].replace("_", "-")
        arguments.append(Argument(name, value, (first, *more)))
    return arguments


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options of `Vllm` that are always invalid."""
    check_integer_option(options, "context", 1)
    check_integer_option(options, "slots", 1)
    check_integer_option(options, "lora_rank", 0, RANKS[-1])
    check_integer_option(options, "max_loras", 2)  # a new adapter is loaded before the old one goes
    check_positive_option(options, "start_seconds")
    check_positive_option(options, "patience")
    if options.get("dtype", "auto") not in DTYPES:
        raise ConfigError(f"engine.options.dtype={options['dtype']!r}", fix=f"one of {', '.join(DTYPES)}")
    head = options.get("head") or "fp32"
    if head not in ("fp32", "model"):
        raise ConfigError(f"engine.options.head={head!r}", fix="fp32 or model")
    arguments = parse_arguments(options.get("args", ()))
    _check_args(arguments)
    if head == "fp32" and any(argument.means("--hf-overrides") for argument in arguments):
        raise ConfigError(
            "engine.options.args has --hf-overrides, by which engine.options.head=fp32 is passed to vLLM",
            fix="engine.options.head=model, and head_dtype among the overrides",
        )
    if not (url := options.get("url")):
        return
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"engine.options.url={url!r} is not an address", fix="for example http://127.0.0.1:8000")
    if remove_login(url) != url:  # it is shown and recorded
        raise ConfigError("engine.options.url has a login in it", fix="reach the server without one: ssh -L 8000:...")
    for name in ("python", "args", "env", "dtype", "context", "head"):
        if options.get(name) and options[name] != "auto":
            raise ConfigError(
                f"engine.options.{name} is for a server that is started here, and engine.options.url joins one",
                fix="leave one of them out",
            )


def _check_args(arguments: Sequence[Argument]) -> None:
    for argument in arguments:
        if argument.words[0] == "--" or not argument.words[0].startswith("-"):
            raise ConfigError(f"engine.options.args: {argument.words[0]!r} belongs to no argument", fix="leave it out")
        if " " in argument.words[0].partition("=")[0]:
            raise ConfigError(f"engine.options.args: {argument.words[0]!r} is one word", fix="write it as two")
        for name, fix in _REFUSED_ARGUMENTS.items():
            if argument.means(name):
                raise ConfigError(f"engine.options.args has {argument.words[0].partition('=')[0]}", fix=fix)
