"""What runs inside the process of an arm: it counts steps and samples, and trains only while it has its turn."""
