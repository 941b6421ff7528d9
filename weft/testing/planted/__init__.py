"""Planted bugs: a catalogue of faults, each replaced in a copy of the tree, and the tests that must see them."""
