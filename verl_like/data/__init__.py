"""Prompts: reading data files, applying the chat template, drawing batches that resume exactly.

Import from the modules: foreign (build_dataset), dataset (PromptDataset), sampler (ResumableSampler),
loader (PromptLoader, iterate_all), preprocess (scripts that write the row schema; they need no torch).
"""
