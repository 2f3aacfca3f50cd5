"""The runtime: decode with a target and a drafter, exactly."""
