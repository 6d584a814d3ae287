"""mallm: on-policy multi-agent reinforcement learning for teams of language-model agents, in JAX."""
