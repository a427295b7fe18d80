"""Fixtures: a new repository, and a sandbox that works everywhere."""

from __future__ import annotations

from rewards.conftest import backend, repository

__all__ = ["backend", "repository"]
