"""The algorithm in blocks of queries and keys: online softmax, schedule, split-KV, plain JAX."""
