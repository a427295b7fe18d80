"""Layers that hold a state instead of keys and values: what a token leaves does not grow with the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from coderepairrl.assembly.sizing.blocks import Block, Held, Mode, Shapes

CHUNK = 64
"""Tokens that Gated DeltaNet computes at once (transformers' ``torch_chunk_gated_delta_rule``)."""


@dataclass(frozen=True, slots=True)
class Delta(Block):
    """Gated DeltaNet: a state instead of keys and values, as in Qwen3.5 and Qwen3-Next.

    What is kept is that of transformers' own functions; the kernels of ``fla`` keep less.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4
    """Tokens that its convolution sees."""
    joined: bool = False
    """Whether one matrix makes queries, keys, values and gate, as in Qwen3-Next."""

    @property
    def shares(self) -> int:  # type: ignore[override]
        """Of keys, and as many of values or a multiple."""
        return self.key_heads

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def linear(self) -> Shapes:
        """By name, but those that make a number per head."""
        h, k, v = self.hidden, self.keys, self.values
        apart = {"in_proj_qkv": (h, 2 * k + v), "in_proj_z": (h, v)}
        return ({"in_proj_qkvz": (h, 2 * k + 2 * v)} if self.joined else apart) | {"out_proj": (v, h)}

    @property
    def read(self) -> tuple[str, ...]:
        """All but the last."""
        return tuple(self.linear)[:-1]

    @property
    def small(self) -> int:  # type: ignore[override]
        """Of decay and strength of an update."""
        return 2 * self.hidden * self.value_heads

    @property
    def others(self) -> int:  # type: ignore[override]
        """Of the convolution, the decay and the norm."""
        return (2 * self.keys + self.values) * self.width + 2 * self.value_heads + self.value_dim

    @property
    def held(self) -> Held:  # type: ignore[override]
        """What vLLM calls its convolution's state and its own."""
        inputs = (self.width - 1) * (2 * self.keys + self.values)
        return Held(parts=self.key_heads, inputs=inputs, state=self.value_heads * self.key_dim * self.value_dim)

    @property
    def mixing(self) -> int:  # type: ignore[override]
        """Within a chunk, and with the state."""
        k, v = self.key_dim, self.value_dim
        return self.value_heads * (2 * CHUNK * k + CHUNK * (k + v) // 2 + CHUNK * v + 3 * k * v)

    def kept(self, mode: Mode) -> float:
        """Of each token, and of each chunk its square and the state it begins with."""
        states = self.value_heads * self.key_dim * self.value_dim / CHUNK
        keys = mode.of(16, 16, 8, 8) * self.keys + mode.of(48, 48, 38, 38) * self.value_heads * self.key_dim
        return (
            self.given(mode, self.hidden, more=1 if self.joined else 2)
            + keys
            + mode.of(44, 40, 36, 32) * self.values
            + (mode.of(1320, 1316, 934, 930) + 4 / CHUNK) * self.value_heads
            + mode.of(4, 4, 8, 8) * states
        )
