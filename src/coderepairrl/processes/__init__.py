"""Starting and ending processes and what they leave behind; git on the host; folders of scratch and caches."""
