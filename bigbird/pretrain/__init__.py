"""Pretraining of encoders: masked words and next sentences."""
