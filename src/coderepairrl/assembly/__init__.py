"""From a configuration to the parts of a run, named and checked before anything is started."""
