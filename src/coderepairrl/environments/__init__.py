"""Environments of tasks: Python environments, and images; once prepared, no network is needed."""
