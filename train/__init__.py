"""Training: entry points (one a method) and the one visible loop that they share."""
