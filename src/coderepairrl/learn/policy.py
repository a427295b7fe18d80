"""The policy: a Hugging Face causal language model that scores packed rows.

Attention runs path by path over a packed prefix tree (`attention`), which on a CPU is exact and several times faster
than a mask over the whole. Every model is probed when it is loaded: one whose rows influence each other is given one
row at a time, and one whose logits are not a linear head on the last hidden state is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import safetensors
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_flash_attn_2_available

from coderepairrl import models
from coderepairrl.config.sections.train import Lora, Precision, Quantise
from coderepairrl.errors import PrerequisiteError, UsageError
from coderepairrl.learn import adapters, experts, quantised, quantised_checkpoint, recurrence, shards
from coderepairrl.learn.attention import FLASH, TREE, Span, Store, chunks, flash_options
from coderepairrl.learn.experts import published
from coderepairrl.learn.head import finished, upcast
from coderepairrl.learn.losses import entropy, kl
from coderepairrl.learn.pack import MicroBatch
from coderepairrl.learn.probe import body, examine
from coderepairrl.learn.settings import LOGITS, OF_VALUES, Form, LearnSettings
from coderepairrl.learn.shared_model import ProvideModel
from coderepairrl.learn.values import FILE as VALUE_HEAD
from coderepairrl.learn.values import ValueHead
from coderepairrl.runs.storage import write_sums

_MODELS_OWN = ("config.json", "generation_config.json")  # beside adapters, transformers would look for full weights
DEFAULTS = LearnSettings()
CPU = torch.device("cpu")


class Other(NamedTuple):
    """Another model at the trained tokens of a micro-batch, which the policy is compared with."""

    hidden_ND: Tensor
    """Its last hidden states (`Policy.states`)."""
    head: Callable[[Tensor], Tensor] | None
    """Its logits of them; None is the policy's own, without adapters."""
    reverse: bool
    """Whether the divergence is KL(policy || other), not KL(other || policy)."""


class Scored(NamedTuple):
    """What there is to know of the trained tokens of a micro-batch."""

    logp_N: Tensor
    right_N: Tensor
    """1.0 where the token is the likeliest, else 0.0."""
    apart: dict[str, Tensor]
    """Divergences (N) from other models, by their names."""
    entropy_N: Tensor
    """Over the vocabulary; of no token where that was not asked."""
    value_N: Tensor
    """Of the value head; of no token where there is none."""


class Packed(nn.Module):
    """A model whose forward pass scores packed rows, all of it, so that DDP, FSDP or DeepSpeed can wrap it."""

    def __init__(self, model: PreTrainedModel, *, bf16: bool, fp32_head: bool = True, values: bool = False) -> None:
        super().__init__()
        self.model: PreTrainedModel = model
        self.bf16 = bf16
        self.value_head = ValueHead(model.config.get_text_config().hidden_size) if values else None
        self.alone = False
        """Whether it computes one row at a time."""
        if bf16 and fp32_head:
            upcast(model.get_output_embeddings())  # type: ignore[no-untyped-call]

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        logits: int = LOGITS,
        others: Mapping[str, Other] | None = None,
        *,
        spread: bool = False,
        states: bool = False,
        values: bool = False,
    ) -> Tensor | Scored:
        """See `Policy.logprobs`; with `others` `Policy.compare`, with `states` `Policy.states`, with `values` alone
        `Policy.valued`."""
        with torch.autocast(batch.ids_T.device.type, torch.bfloat16, enabled=self.bf16):
            if batch.chunk_tokens:
                if states or values or others is not None:
                    raise ValueError("a tree that is computed chunk by chunk has logprobs alone")
                weights = next((p for p in self.model.parameters() if p.requires_grad), None)
                return cast(Tensor, cast(Any, _TwoPasses).apply(weights, self, batch, temperature, logits))
            # not by [at_N], in which prefixes repeat: its backward pass adds in any order where there are threads
            hidden_ND = self.hidden(batch).index_select(0, batch.at_N)
            if states:
                return hidden_ND
            if others is not None:
                scored = self._compared(hidden_ND, batch.target_N, temperature, logits, others, spread)
            else:
                logp_N = self.scores(hidden_ND, batch.target_N, temperature, logits)
                if not values:
                    return logp_N
                scored = Scored(logp_N, nothing := logp_N.new_zeros(0), {}, nothing, nothing)
            return scored if self.value_head is None else scored._replace(value_N=self.value_head(hidden_ND))

    def scores(self, hidden_ND: Tensor, target_N: Tensor, temperature: float, logits: int) -> Tensor:
        """Logprobs of tokens (N), of so many at once as `logits` allows; the backward pass computes them again."""
        at_once = max(1, logits // self.model.config.get_text_config().vocab_size)
        if len(hidden_ND) <= at_once:
            return self._score(hidden_ND, target_N, temperature)
        pairs = zip(torch.split(hidden_ND, at_once), torch.split(target_N, at_once), strict=True)
        return torch.cat(
            [
                cast(Tensor, checkpoint(self._score, hidden, target, temperature, use_reentrant=False))
                for hidden, target in pairs
            ]
        )

    def _compared(
        self,
        hidden_ND: Tensor,
        target_N: Tensor,
        temperature: float,
        logits: int,
        others: Mapping[str, Other],
        spread: bool,
    ) -> Scored:
        """`Policy.compare` of so many tokens at once as `logits` allows; the backward pass computes them again."""
        at_once = max(1, logits // (self.model.config.get_text_config().vocab_size * (1 + len(others) + spread)))
        parts: list[Scored] = []
        for at in range(0, len(hidden_ND), at_once):
            here = slice(at, at + at_once)
            some = {name: other._replace(hidden_ND=other.hidden_ND[here]) for name, other in others.items()}
            inputs = hidden_ND[here], target_N[here], temperature, some, spread
            alone = len(hidden_ND) <= at_once
            part = self._compare(*inputs) if alone else checkpoint(self._compare, *inputs, use_reentrant=False)
            parts.append(cast(Scored, part))
        apart = {name: torch.cat([part.apart[name] for part in parts]) for name in others}
        logp_N, right_N, _, entropy_N, _ = zip(*parts, strict=True)
        return Scored(torch.cat(logp_N), torch.cat(right_N), apart, torch.cat(entropy_N), hidden_ND.new_zeros(0))

    def _compare(
        self, hidden_ND: Tensor, target_N: Tensor, temperature: float, others: Mapping[str, Other], spread: bool
    ) -> Scored:
        logits_NV = self.head(hidden_ND) / temperature
        right_N = (logits_NV.argmax(-1) == target_N).float()
        apart = {}
        for name, other in others.items():
            with torch.no_grad(), adapters.off(self.model):
                other_NV = (other.head or self.head)(other.hidden_ND) / temperature
            apart[name] = kl(logits_NV, other_NV) if other.reverse else kl(other_NV, logits_NV)
        nothing = right_N.new_zeros(0)
        entropy_N = entropy(logits_NV) if spread else nothing
        return Scored(-cross_entropy(logits_NV, target_N, reduction="none"), right_N, apart, entropy_N, nothing)

    def hidden(self, batch: MicroBatch, spans: Sequence[Span] = (), store: Store | None = None) -> Tensor:
        """The last hidden states (TD); of a chunk with these `spans` alone, whose ancestors are in `store`."""
        here = slice(spans[0].start, spans[-1].stop) if spans else slice(None)
        out = body(self.model)(
            input_ids=batch.ids_T[None, here],
            position_ids=batch.positions_T[None, here],
            use_cache=False,
            **({"spans": spans, "store": store} if spans else self._paths(batch)),
        )
        return cast(Tensor, out.last_hidden_state[0])

    def _paths(self, batch: MicroBatch) -> dict[str, Any]:
        """The tree as the attention needs it."""
        if self.model.config._attn_implementation == FLASH:
            return {**flash_options(batch.spans, batch.ids_T.device), "spans": batch.spans}
        if len(batch.spans) == 1:
            return {}  # a row, as transformers knows it
        if self.alone:
            raise ValueError(f"{type(self.model).__name__} computes one row at a time")
        return {"spans": batch.spans}

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits of hidden states, in float32."""
        head = cast(nn.Module, self.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return finished(cast(Tensor, head(hidden_ND)).float(), self.model.config.get_text_config())

    def _score(self, hidden_ND: Tensor, target_N: Tensor, temperature: float) -> Tensor:
        logits_NV = self.head(hidden_ND)
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        return -cross_entropy(logits_NV, target_N, reduction="none")


class _TwoPasses(torch.autograd.Function):
    """Logprobs of a tree of which only a chunk's activations are in memory at a time, with all keys and values.

    The forward pass goes through the chunks without keeping anything else but what attention gave. The backward pass
    goes back through them, computes each again but for attention, and adds up the gradients of its ancestors' keys and
    values, from which theirs go on.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor | None, packed: Packed, batch: MicroBatch, temperature: float, logits: int
    ) -> Tensor:
        store = Store(len(batch.ids_T))
        logp_N = torch.empty(len(batch.at_N), device=batch.ids_T.device)
        for spans in chunks(batch.spans, batch.chunk_tokens):
            hidden_CD = packed.hidden(batch, spans, store)
            at, here = _within(batch, spans)
            logp_N[here] = packed.scores(hidden_CD[at], batch.target_N[here], temperature, logits)
        ctx.inputs, ctx.store = (packed, batch, temperature, logits), store
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[None, ...]:
        packed, batch, temperature, logits = ctx.inputs
        for spans in reversed(chunks(batch.spans, batch.chunk_tokens)):
            with torch.enable_grad(), torch.autocast(batch.ids_T.device.type, torch.bfloat16, enabled=packed.bf16):
                hidden_CD = packed.hidden(batch, spans, ctx.store)
                at, here = _within(batch, spans)
                logp_N = packed.scores(hidden_CD[at], batch.target_N[here], temperature, logits)
            # the states as well: of a chunk without a trained token, keys and values still have a gradient
            torch.autograd.backward((logp_N, hidden_CD), (gradient_N[here], torch.zeros_like(hidden_CD)))
        return (None,) * 5


def _within(batch: MicroBatch, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Which trained tokens a chunk predicts: the places in it that do, and their numbers in N."""
    here = ((batch.at_N >= spans[0].start) & (batch.at_N < spans[-1].stop)).nonzero()[:, 0]
    return batch.at_N[here] - spans[0].start, here


class Policy:
    """A model in evaluation mode (no dropout) with trainable weights or trainable adapters."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        settings: LearnSettings = DEFAULTS,
        device: torch.device = CPU,
    ) -> None:
        """`folder` holds the config and the tokenizer that `save` copies."""
        if settings.lora is not None:
            settings = settings.but(lora=adapters.resolved(model, settings.lora))
        self.settings = settings
        self.folder = folder
        self.device = device
        self.model: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        model.train(False)  # no dropout
        bf16, fp32_head = settings.precision == "bf16", settings.head == "fp32"
        self._packed = Packed(model, bf16=bf16, fp32_head=fp32_head, values=settings.value_head).to(device)
        recurrence.install(model)
        self.found = examine(model, self._packed.hidden, self._packed.head)
        self._packed.alone = self.found.way == "rows"
        self.model.set_attn_implementation(self.found.attention if settings.attention == "rows" else settings.attention)
        if settings.lora is not None:
            adapters.attach(model, settings.lora, settings.seed)
        if settings.gradient_checkpointing:
            self._checkpoint_layers()
        self.module: nn.Module = self._packed
        """What `logprobs` calls: the packed model, or its wrapper where processes share it."""
        self.whole: Callable[[Tensor], Tensor] = Tensor.detach
        """Gathers a tensor that processes share (`strategy.SingleProcess.whole`)."""

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: LearnSettings = DEFAULTS,
        device: torch.device = CPU,
        *,
        frozen: bool = False,
        provide: ProvideModel | None = None,
    ) -> Policy:
        """Load the model in `folder`, a `frozen` one without adapters, to be compared with. Where there is a `provide`,
        it has the model on `device` already, or loads it for other runs, too.

        Raises `UsageError` when there is none or it cannot be trained packed, or shared.
        """
        if provide is not None and settings.lora is None:
            raise UsageError(
                "a learner that several runs share (train.learner) holds a frozen model, and all weights are to be"
                " trained",
                fix="train.lora=true, or a learner of the run's own: leave train.learner out",
            )
        if frozen:
            without = dict.fromkeys(("lora", "kl", "kl_in", *OF_VALUES))
            settings = settings.but(
                **without, beta=0.0, value_head=False, gradient_checkpointing=False, quantise="none"
            )
        if (folder / adapters.CONFIG).is_file():
            raise UsageError(
                f"{folder} holds adapters, not a model",
                fix="merge them first (peft: merge_and_unload, save_pretrained)",
            )
        if not (folder / "config.json").is_file():
            raise UsageError(f"{folder} holds no model: config.json is missing")
        if settings.attention == "flash_attention_2" and not is_flash_attn_2_available():
            raise PrerequisiteError(
                "train.attention=flash_attention_2 needs a GPU and the package flash-attn",
                fix="pip install flash-attn --no-build-isolation, or train.attention=rows",
            )
        half = settings.precision == "bf16" and (frozen or settings.lora is not None)
        dtype = torch.bfloat16 if half else torch.float32
        try:
            if about := models.quantisation_config(folder):
                settings = settings if frozen else settings.but(quantise="checkpoint")
            form = f"{str(dtype).removeprefix('torch.')} with model.quantise={settings.quantise}"

            def read() -> PreTrainedModel:
                return _read(folder, settings, about, dtype, device)

            model = read() if provide is None else provide(folder, form, lambda: read().to(device))  # type: ignore[arg-type]
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UsageError(f"cannot load the model in {folder}: {error}") from error
        if frozen:
            model.requires_grad_(False)
        return cls(model, folder, settings, device)

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of the model by its own names; tied weights once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def values(self) -> dict[str, nn.Parameter]:
        """Those of the value head, which no engine is given; none without one."""
        head = self._packed.value_head
        return {} if head is None else {f"{VALUE_HEAD}.{name}": p for name, p in head.named_parameters()}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """All trainable parameters."""
        return self.weights | self.values

    @property
    def constants(self) -> dict[str, Tensor]:
        """What a whole model's files have beside parameters, by name: buffers, such as biases of a router."""
        kept = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    @property
    def tables(self) -> list[nn.Parameter]:
        """The matrices with a row per token: embeddings and head, which may be the same; and that of the value head."""
        modules = (self.model.get_input_embeddings(), self.model.get_output_embeddings())  # type: ignore[no-untyped-call]
        return [*(p for module in modules for p in module.parameters()), *self.values.values()]

    def logprobs(self, batch: MicroBatch, temperature: float, logits: int = LOGITS) -> Tensor:
        """``log softmax(logits / temperature)`` of the trained tokens (N), in float32.

        At most about `logits` logits are in memory at a time; the backward pass then computes them again.
        """
        return cast(Tensor, self.module(batch.to(self.device), temperature, logits))

    def valued(self, batch: MicroBatch, temperature: float, logits: int = LOGITS) -> Scored:
        """`logprobs` of the trained tokens, and the values of the contexts that they were sampled in."""
        return cast(Scored, self.module(batch.to(self.device), temperature, logits, values=True))

    def compare(
        self,
        batch: MicroBatch,
        temperature: float,
        others: Mapping[str, Other],
        logits: int = LOGITS,
        *,
        spread: bool = False,
    ) -> Scored:
        """`logprobs` of the trained tokens, whether each is the likeliest, divergences from `others`, with `spread` the
        entropy, and values where there is a head.

        Both sides of a divergence are at `temperature`. Memory as in `logprobs`.
        """
        return cast(Scored, self.module(batch.to(self.device), temperature, logits, others, spread=spread))

    @torch.no_grad()
    def states(self, batch: MicroBatch) -> Tensor:
        """The last hidden states from which the trained tokens are predicted (ND)."""
        return cast(Tensor, self.module(batch.to(self.device), states=True))

    def as_other(self, batch: MicroBatch, *, reverse: bool) -> Other:
        """This model as one to compare with, at the trained tokens of `batch`."""
        return Other(self.states(batch), self._packed.head, reverse)

    @property
    def chunkable(self) -> bool:
        """Whether it computes a tree chunk by chunk (`MicroBatch.chunk_tokens`): on a CPU, by attention alone."""
        config = self.model.config.get_text_config()
        alike = self.found.chunked and getattr(config, "sliding_window", None) is None
        return alike and self.device.type == "cpu"

    def initial(self) -> AbstractContextManager[None]:
        """Within, the model without its adapters, as before training. Only for a policy that trains adapters."""
        return adapters.off(self.model)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Trainable tensors, and `constants` of a whole model, by their names in files.

        Where processes share the model, all must iterate.
        """
        yield from self._trained()
        if self.settings.lora is None:
            yield from self.constants.items()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.weights.items():
            yield self.file_name(name), self.whole(parameter)

    def file_name(self, name: str) -> str:
        """A parameter's name in `state` and in files."""
        return name if self.settings.lora is None else adapters.peft_name(name)

    @property
    def stem(self) -> str:
        """Stem of the file that `state` is written to."""
        return shards.MODEL if self.settings.lora is None else adapters.FILE

    def save(self, folder: Path, *, here: bool = True) -> None:
        """Write config, tokenizer and trainable tensors, exactly, as a model's folder or an adapter's; the value head
        beside them, in a file of its own.

        Where `here` is false nothing is written, but the process takes part in gathering (`shards.write`).
        """
        shards.write(folder, self.stem, self.state(), here=here)
        if self.values:
            shards.write(folder, VALUE_HEAD, ((n, self.whole(p)) for n, p in self.values.items()), here=here)
        if here:
            self._write_layout(folder, self.stem)

    @property
    def saved(self) -> dict[str, dict[str, nn.Parameter]]:
        """What `save` writes: parameters by their names in files, by the stem of these."""
        named = {self.file_name(name): p for name, p in self.weights.items()}
        return {self.stem: named} | ({VALUE_HEAD: self.values} if self.values else {})

    def export(self, folder: Path, form: Form, *, here: bool = True) -> None:
        """Write weights for an engine to `folder`, in bfloat16 if that is the precision; `here` as in `save`.

        ``model`` is a whole model, adapters merged in float32; ``adapter`` the adapters alone, in peft's layout.
        """
        stem = shards.MODEL if form == "model" else adapters.FILE
        shards.write(folder, stem, self.exported(form), here=here)
        if here:
            self._write_layout(folder, stem)

    def exported(self, form: Form) -> Iterator[tuple[str, Tensor]]:
        """The tensors that `export` writes, gathered one by one: all processes that share them must iterate.

        Raises ValueError for adapters of a policy that has none.
        """
        if form == "adapter" and self.settings.lora is None:
            raise ValueError("there are no adapters: all weights are trained")
        merge = form == "model" and self.settings.lora is not None
        tensors = adapters.merged(self.model, self.whole) if merge else self._trained()
        if form == "adapter" and self.settings.lora is not None:
            tensors = experts.served(self.model, tensors, self.settings.lora.rank)
        dtype = torch.bfloat16 if self.settings.precision == "bf16" else torch.float32
        rounded = ((name, tensor.to(dtype)) for name, tensor in tensors)
        # constants as they are: a router's bias may be float32 in bfloat16, too
        return published(self.model, chain(rounded, self.constants.items())) if form == "model" else rounded

    def _write_layout(self, folder: Path, stem: str) -> None:
        adapter = stem == adapters.FILE
        copy_layout(self.folder, folder, without=_MODELS_OWN if adapter else ())
        if not adapter and self.settings.quantise == "checkpoint":  # numbers are written out
            config = json.loads((folder / "config.json").read_text("utf-8"))
            del config["quantization_config"]
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if adapter and self.settings.lora is not None:
            adapters.write_config(folder, self.settings.lora, self.folder)

    def _checkpoint_layers(self) -> None:
        layers = [module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise UsageError(f"{type(self.model).__name__} knows no gradient checkpointing")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            layer.training = True  # they checkpoint only in training mode; their submodules stay without dropout


def _read(
    folder: Path, settings: LearnSettings, about: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model in `folder`, quantised on `device`; `about` is the format of its codes, where its files have codes."""
    if about:
        return quantised_checkpoint.load(folder, about, dtype, TREE)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=TREE, local_files_only=True
    )
    if settings.quantise in ("nf4", "int8"):
        quantised.quantise(model, settings.quantise, quantised.checkpoint_dtype(folder, model.dtype), device)
    return model


def init_random(source: Path, target: Path, seed: int) -> None:
    """Write a model with random weights to `target`, from the config.json and tokenizer in `source`.

    The same seed gives the same bits. Raises `UsageError` when `source` has no usable config.json.
    """
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise UsageError(f"cannot read the model configuration in {source}: {error}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=TREE, dtype=torch.float32
        )
    target.mkdir(parents=True, exist_ok=True)
    Policy(model, source).export(target, "model")
    config.architectures = [type(model).__name__]
    config.save_pretrained(target)
    write_sums(target)


def language_model(source: Path, target: Path) -> None:
    """Write the causal language model in `source`, of a multimodal one its language model, to `target`, weights with
    their values, under the names that files of the architecture have.

    Raises `UsageError` where there is none.
    """
    try:
        # a checkpoint of all weights is float32, whatever the config says that it was copied from
        dtype = torch.float32 if (source / "learner.json").is_file() else "auto"
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot load the model in {source}: {error}") from error
    target.mkdir(parents=True, exist_ok=True)
    kept = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in kept)
    shards.write(target, shards.MODEL, published(model, chain(model.named_parameters(), buffers)))
    copy_layout(source, target)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)


def copy_layout(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    """Copy configs, tokenizer and templates of a model's folder."""
    for file in source.iterdir():
        layout = file.suffix in (".json", ".txt", ".jinja", ".model") and ".index." not in file.name
        if file.is_file() and layout and file.name not in (*without, models.QUANTISED):
            shutil.copyfile(file, target / file.name)


def rounded(source: Path, target: Path, form: Quantise, precision: Precision) -> None:
    """Write the model in `source` to `target` with the numbers that its weights have when they are quantised to `form`,
    as any engine serves them. A learner of that form has the same ones from either folder.

    Raises `UsageError` for a model that cannot be quantised, `PrerequisiteError` without the package for it.
    """
    policy = Policy.load(source, LearnSettings(lora=Lora(), quantise=form, precision=precision))
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")  # adapters add nothing yet
    (target / models.QUANTISED).write_text(json.dumps({"form": form}) + "\n")
    write_sums(target)


def merge(base: Path, adapter: Path, target: Path, precision: Precision) -> None:
    """Write the model in `base` merged with the adapters in `adapter` (peft's layout) to `target`.

    With the `precision` of the run, the result is what its engine served. Raises `UsageError` when the two do not
    belong together.
    """
    policy = _with_adapters(base, adapter, precision)
    target.mkdir(parents=True, exist_ok=True)
    policy.export(target, "model")


def engine_form(base: Path, adapter: Path, target: Path) -> None:
    """Write the adapters in `adapter`, a checkpoint's, to `target` as engines of the model in `base` read them, which
    is another form where they are on experts. The values stay as they are.

    Raises `UsageError` when the two do not belong together.
    """
    try:
        lora = adapters.read_config(adapter)
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        target.mkdir(parents=True, exist_ok=True)
        with shards.TensorFiles(adapter, adapters.FILE) as files:
            tensors = ((name, files[name]) for name in files)
            shards.write(target, adapters.FILE, experts.served(model, tensors, lora.rank))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{adapter} holds no adapters for {base}: {error}") from error
    copy_layout(base, target, without=_MODELS_OWN)
    adapters.write_config(target, lora, base)


def survived(base: Path, adapter: Path, result: Path, precision: Precision) -> float:
    """How much of what `adapter` adds to `base` is left in `result`, the two merged and then rounded: 1 is all.

    Of all adapted layers together, the share ``<result - base, delta> / <delta, delta>`` of the adapters' product
    `delta`. A product far below a step of the numbers rounds back to the base and leaves 0. Raises `UsageError` when
    the three do not belong together.
    """
    policy = _with_adapters(base, adapter, precision)
    left = total = 0.0
    try:
        with shards.TensorFiles(result, shards.MODEL) as files:
            deltas, before = published(policy.model, adapters.deltas(policy.model)), adapters.below(policy.model)
            for (name, delta), (_, was) in zip(deltas, published(policy.model, before), strict=True):
                change = files[name].to(was.device).float() - was.float()
                left += (change * delta).sum(dtype=torch.float64).item()
                total += delta.square().sum(dtype=torch.float64).item()
    except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{result} is not {base} merged with {adapter}: {error}") from error
    return left / total if total else 1.0


def _with_adapters(base: Path, adapter: Path, precision: Precision) -> Policy:
    """The model in `base` with the adapters in `adapter`. Raises `UsageError` when they do not belong together."""
    try:
        lora = adapters.read_config(adapter)
        policy = Policy.load(base, LearnSettings(lora=lora, precision=precision))
        with shards.TensorFiles(adapter, adapters.FILE) as files:
            files.check({policy.file_name(name): value.shape for name, value in policy.parameters.items()})
            for name, parameter in policy.parameters.items():
                parameter.data.copy_(files[policy.file_name(name)])
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{adapter} holds no adapters for {base}: {error}") from error
    return policy
