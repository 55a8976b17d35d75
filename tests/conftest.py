pytest_plugins = ["durable_actors.testing.plugin"]
