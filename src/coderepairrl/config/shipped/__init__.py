"""Configs that ship with the package."""
