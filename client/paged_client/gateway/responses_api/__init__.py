"""OpenAI's Responses API, without stored responses."""
