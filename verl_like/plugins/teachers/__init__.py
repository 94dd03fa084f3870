"""Teachers of distillation: which one a row has, servers and files that know log-probs, hints for the teacher alone."""
