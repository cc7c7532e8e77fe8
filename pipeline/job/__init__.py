"""A job: opens it, says what its store records of it, leases its streams, and measures and watches its progress."""
