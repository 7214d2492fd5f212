"""The ranks of a training compared: clocks, messages, who waits for whom and why."""
