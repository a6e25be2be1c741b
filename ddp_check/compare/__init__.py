"""Reads the notes of both runs, and says where they part."""
