"""What a client has beyond OpenAI's resources, each for both kinds of client."""
