"""The stream between control plane and peers: messages, session rules without I/O, and thin aiohttp ends."""
