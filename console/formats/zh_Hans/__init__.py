"""See `console.formats`."""
