"""Recipes that measure: what they write down, and that a model is asked for no more than it can do."""
