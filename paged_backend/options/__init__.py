"""The engine's options, by concern; :class:`paged_backend.config.EngineConfig` has all of them."""
