"""Linear attention inside other libraries' models. Each module is imported only on request."""
