"""Episodes: answers to prompts, of one turn or many, collected into groups and batches. Knows neither Ray nor vLLM."""
