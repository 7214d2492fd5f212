"""Training frameworks, one module each (huggingface, lightning, accelerate): imported by name, so that none needs another's package."""
