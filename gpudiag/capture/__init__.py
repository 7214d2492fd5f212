"""Recording a training loop into a bundle, and reading a bundle back. The only code that imports torch.profiler, and only lazily."""
