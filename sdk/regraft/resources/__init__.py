"""Resources beyond OpenAI's, for both kinds of clients."""
