"""Supervised training on answers that the data hold: verl's sft_trainer on the trainer's own engine."""
