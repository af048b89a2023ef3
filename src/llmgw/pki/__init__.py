"""Identity: the authority, the certificates it issues, TLS contexts, and what is wrong when TLS fails."""
