"""Where else metrics go: services, event files, Prometheus."""
