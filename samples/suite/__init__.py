"""The suite of planted bottlenecks: what each sample expects, and how a report on it is scored."""
