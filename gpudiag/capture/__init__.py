"""Recording a training loop into a bundle. The only code that imports torch.profiler, and only lazily."""
