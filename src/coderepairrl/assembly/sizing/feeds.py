"""What a token goes through by itself after a mixer of tokens: an MLP or experts; and a layer of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from coderepairrl.assembly.sizing.blocks import Block, Mode, Shapes


@dataclass(frozen=True, slots=True)
class Mlp(Block):
    """Gated."""

    hidden: int
    width: int

    @property
    def linear(self) -> Shapes:
        """By name."""
        h, f = self.hidden, self.width
        return {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    @property
    def read(self) -> tuple[str, ...]:
        """Two."""
        return ("gate_proj", "up_proj")

    @property
    def widest(self) -> int:
        """Both sides of the product."""
        return 2 * self.width

    def kept(self, mode: Mode) -> float:
        """Two sides, the activation of one, and the product."""
        return self.given(mode, self.hidden) + mode.of(16, 16, 8, 8) * self.width

    def passing(self, mode: Mode) -> float:
        """Gradients of its input and of both sides of the product."""
        h, f = self.hidden, self.width
        if not mode.half:
            return 4 * (h + 2 * f)
        return max(2 * h + 5 * f // 2, 8 * h) if mode.lora else max(2 * h + 4 * f, 10 * h)

    @property
    def gradient(self) -> int:
        """One matrix's."""
        return self.hidden * self.width


@dataclass(frozen=True, slots=True)
class Experts(Block):
    """Each token goes through some of them, and through what all share."""

    hidden: int
    count: int
    chosen: int
    width: int
    shared: int = 0
    """Width of an MLP for all tokens."""
    kind: Literal["", "normed", "mixtral", "gated", "grouped", "biased"] = ""
    """Whether weights of the chosen ones are made to add up to 1, as in Qwen3, or Mixtral's way; what is shared is
    gated, as in Qwen3.5; groups of experts are chosen first, as in GLM and DeepSeek; or everything has biases, as in
    gpt-oss."""

    @property
    def linear(self) -> Shapes:
        """Experts are none: all of a layer are one tensor."""
        return Mlp(self.hidden, self.shared).linear if self.shared else {}

    @property
    def read(self) -> tuple[str, ...]:
        """Of what is shared."""
        return ("gate_proj", "up_proj") if self.shared else ()

    @property
    def small(self) -> int:  # type: ignore[override]
        """Of what chooses, and of the gate."""
        return self.hidden * (self.count + (self.kind == "gated"))

    @property
    def one(self) -> int:
        """Weights of an expert."""
        return 3 * self.hidden * self.width

    @property
    def others(self) -> int:  # type: ignore[override]
        """Of all experts."""
        biases = self.count * (2 * self.width + self.hidden + 1) if self.kind == "biased" else 0
        return self.count * self.one + biases

    @property
    def products(self) -> int:
        """With the chosen ones' weights."""
        return self.matrices + self.chosen * self.one

    @property
    def widest(self) -> int:
        """Of all that are chosen."""
        return 2 * self.chosen * self.width + 2 * self.shared

    def kept(self, mode: Mode) -> float:
        """Trained ones are computed in float32, frozen ones keep no input."""
        h, f, size = self.hidden, self.width, 2 if mode.half and mode.lora else 4
        steps = 3 * (self.kind == "biased")  # of its activation
        numbers, scores, once = {
            "": (mode.of(36, 36, 34, 34), 4, 0),
            "normed": (mode.of(40, 40, 38, 38), 4, 4),
            "mixtral": (40, 4, 4),
            "gated": (mode.of(40, 40, 38, 38), 4, mode.of(8, 8, 6, 6)),
            "grouped": (mode.of(40, 40, 36, 36), mode.of(5, 5, 3, 3), mode.of(28, 28, 26, 26)),
            "biased": (mode.of(48, 40, 44, 36), 0, 0),
        }[self.kind]
        each = size * ((3 + steps) * f + h if mode.lora else (4 + steps) * f + 2 * h) + numbers
        gated = self.kind == "gated"
        around = self.given(mode, h, more=1 + gated) + mode.size * h * gated + mode.of(16, 16, 8, 8) * self.shared
        return self.chosen * each + scores * self.count + once + around

    def copied(self, mode: Mode) -> int:
        """Where each one's tokens end."""
        return 4 * self.count

    def passing(self, mode: Mode) -> float:
        """Gradients of inputs and products of those that a token goes through."""
        size, inputs = (2 if mode.half and mode.lora else 4), 1 + (not mode.half)
        return size * (inputs * self.hidden + self.chosen * (self.hidden + 2 * self.width))

    @property
    def gradient(self) -> int:
        """All experts' of a layer, as one tensor."""
        return 2 * self.count * self.hidden * self.width


class Layer(NamedTuple):
    """A mixer of tokens, and what each goes through by itself."""

    mixer: Block
    feed: Block
    norms: int = 2
    """Of the width of the layer's input: before both, or after them as well."""

    def kept(self, mode: Mode, hidden: int) -> float:
        """Bytes per token for the backward pass, but of adapters."""
        return self.norms * (mode.of(8, 4, 8, 4) * hidden + 4) + self.mixer.kept(mode) + self.feed.kept(mode)

    @property
    def linear(self) -> Shapes:
        """Of both."""
        return self.mixer.linear | self.feed.linear

    @property
    def matrices(self) -> int:
        """Weights of both's matrices, but of experts."""
        return self.mixer.matrices + self.feed.matrices

    def adapters(self, rank: int, targets: frozenset[str]) -> int:
        """Parameters of low-rank adapters on linear layers `targets`."""
        return rank * sum(sum(shape) for name, shape in self.linear.items() if name in targets)

    def parameters(self, hidden: int) -> int:
        """All of them."""
        return self.mixer.parameters + self.feed.parameters + self.norms * hidden
