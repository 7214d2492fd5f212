"""Rules: schema, loader, expressions, engine, self-test."""
