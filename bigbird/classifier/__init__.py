"""Long-document classification: the command, its shell scripts, notebook and demo."""
