"""What requests may say and what answers look like: the fields of OpenAI's API."""
