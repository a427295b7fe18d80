"""Starting and ending processes, git on the host, scratch folders and caches."""
