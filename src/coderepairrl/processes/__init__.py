"""Child processes, git on the host, temporary folders and caches."""
