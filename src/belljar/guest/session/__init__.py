"""What runs turns of a session inside the sandbox: the agent, and parts of it that it loads when they are needed."""
