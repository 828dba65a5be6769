"""Summarization of long documents."""
