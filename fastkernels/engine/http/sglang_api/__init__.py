"""SGLang's own API: /generate and the routes that its benchmark calls."""
