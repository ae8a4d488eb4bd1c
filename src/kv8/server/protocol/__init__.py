"""What clients send and get: OpenAI's shapes, every field honoured or refused by name."""
