"""Plans of runs, from a configuration: parts are named and checked before anything starts."""
