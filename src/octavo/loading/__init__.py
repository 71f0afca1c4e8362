"""From a model's name to its settings, weights and tokenizer. Knows file formats; knows no backend and no engine."""
