"""The web server: one ASGI application on uvicorn, with limits for each client."""
