"""Two recordings compared step by step, and one checked against gates."""
