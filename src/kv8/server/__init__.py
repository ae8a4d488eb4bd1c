"""`kv8 serve`: an OpenAI-compatible server around one engine thread."""
