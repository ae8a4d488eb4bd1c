"""``kv8 bench``: how fast kv8 is here, beside what this machine's memory and arithmetic allow."""
