"""Attempts, episodes and groups: where agent, sandbox, gateway and reward meet."""
