"""How a policy plays a question: prompt, grammar, rollout."""
