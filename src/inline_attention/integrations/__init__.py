"""Linear attention inside other libraries' models. Nothing here is imported before it is asked for by name."""
