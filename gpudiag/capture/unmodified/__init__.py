"""Recording a script that was not written for it: the injector, the rule that finds its steps, and what drives a session by it."""
