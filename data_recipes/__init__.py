"""Prompts, the target's answers to them, and the batches that training reads."""
