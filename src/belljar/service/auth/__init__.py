"""Who asks: API keys, JWT, scopes, refusals."""
