"""Models, attention, recomputation, data and training shared by every task."""
