"""Sections of a configuration: fields with defaults, bounds and meaning."""
