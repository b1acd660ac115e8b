"""From text to rollouts: tokenizers, chat templates, the sampler, agents' turns."""
