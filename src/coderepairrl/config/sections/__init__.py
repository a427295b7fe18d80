"""The sections of a configuration: what can be set, each field with its default, its bounds and what it means."""
