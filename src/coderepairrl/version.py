"""The version, apart from the package, which imports the library: modules of the library read it."""

__version__ = "0.1.0"
