"""Reference implementations of RL post-training methods in pure functional JAX."""
